"""The tree's `apex.fused_dense`."""

from __future__ import annotations

from autoamp.compat.layers.mlp import (
    FusedDense,
    FusedDenseGeluDense,
    dense_no_bias_function,
    fused_dense_function,
    fused_dense_gelu_dense_function,
)
from autoamp.compat.missing import missing_names

from . import fused_dense

__getattr__ = missing_names(__name__)
