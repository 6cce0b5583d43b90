"""The tree's `apex.fused_dense.fused_dense`."""

from autoamp.apex.layers.mlp import FusedDense, FusedDenseGeluDense, fused_dense_function
