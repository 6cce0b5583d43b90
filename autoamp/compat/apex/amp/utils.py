"""The tree's `apex.amp.utils`."""

from autoamp.compat.amp.utils import (
    as_inplace,
    casted_args,
    collect_fp_tensor_types,
    get_cuda_version,
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
    verbosify,
)
