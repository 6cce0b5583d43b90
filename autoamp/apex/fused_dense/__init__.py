"""`apex.fused_dense`: dense layers."""

from autoamp.apex.fused_dense.fused_dense import FusedDense, FusedDenseGeluDense, fused_dense_function
