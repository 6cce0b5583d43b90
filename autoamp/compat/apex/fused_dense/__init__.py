"""The tree's `apex.fused_dense`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.mlp import (
    FusedDense,
    FusedDenseGeluDense,
    dense_no_bias_function,
    fused_dense_function,
    fused_dense_gelu_dense_function,
)

from . import fused_dense

__getattr__ = missing_names(__name__)
