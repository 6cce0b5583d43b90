"""A layer norm over the last dimension, and its function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autoamp.apex.normalization.fused_layer_norm import FusedLayerNorm, NormFunction, wide_layer_norm


class FastLayerNorm(FusedLayerNorm):
    """`FusedLayerNorm` over the last dimension. Arguments ``(hidden_size, eps=1e-5, memory_efficient=False)``."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, True, memory_efficient)
        self.epsilon = eps


class FastLayerNormFN(NormFunction):
    """Layer norm over the last dimension with weights; the result has the dtype of its input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, memory_efficient: bool = False
    ) -> Tensor:
        """Normalise ``x``, shape ``(*, hidden)``, then multiply by ``gamma`` and add ``beta``, both ``(hidden,)``."""
        return wide_layer_norm(x, gamma.numel(), gamma, beta, epsilon, x.dtype)


_fast_layer_norm = FastLayerNormFN.apply
