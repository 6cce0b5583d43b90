"""The tree's `apex.amp.utils`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.utils import (
    casted_args,
    has_func,
    is_cuda_enabled,
    is_floating_point,
    is_fp_tensor,
    is_nested,
    iter_params,
    maybe_float,
    maybe_half,
    set_func,
    type_string,
)

__getattr__ = missing_names(__name__)
