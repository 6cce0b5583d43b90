"""The autograd functions of `apex.normalization` and `apex.contrib.layer_norm`, which programs call by ``apply``.

Megatron and programs derived from it do so, and look at the arguments of ``forward`` to learn whether it takes
``memory_efficient``, which has no effect here. These are no autograd functions: they call torch's norms, so second
derivatives work too. All compute in fp32, or in fp64 for fp64 input, and pay no heed to `torch.autocast`. ``ctx`` has
no effect. The result has the shape of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autoamp.apex.normalization.fused_layer_norm import wide_layer_norm, wide_rms_norm

__all__ = [
    "FastLayerNormFN",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
]

Shape = int | Sequence[int]


class _Function:
    """Gives ``forward`` the way in by ``apply`` that an autograd function has."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Tensor:
        """Return what ``forward`` does, given its arguments but for ``ctx``."""
        result: Tensor = cls.forward(None, *args, **kwargs)  # type: ignore[attr-defined]
        return result


class FusedLayerNormAffineFunction(_Function):
    """Layer norm with weights; the result has the dtype of its input."""

    _has_dtype_of_weight = False

    @classmethod
    def forward(
        cls, ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Shape, eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:  # fmt: skip
        """Normalise over the last dimensions, then multiply by ``weight`` and add ``bias``."""
        dtype = weight.dtype if cls._has_dtype_of_weight else input.dtype
        return wide_layer_norm(input, normalized_shape, weight, bias, eps, dtype)


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """Layer norm with weights; the result has their dtype."""

    _has_dtype_of_weight = True


class FusedLayerNormFunction(_Function):
    """Layer norm without weights; the result has the dtype of its input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False) -> Tensor:
        """Normalise over the last dimensions."""
        return wide_layer_norm(input, normalized_shape, None, None, eps, input.dtype)


class FusedRMSNormAffineFunction(_Function):
    """RMS norm with weights; the result has the dtype of its input."""

    _has_dtype_of_weight = False

    @classmethod
    def forward(
        cls, ctx: Any, input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:  # fmt: skip
        """Divide by the root of the mean square over the last dimensions, then multiply by ``weight``."""
        dtype = weight.dtype if cls._has_dtype_of_weight else input.dtype
        return wide_rms_norm(input, normalized_shape, weight, eps, dtype)


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """RMS norm with weights; the result has their dtype."""

    _has_dtype_of_weight = True


class FusedRMSNormFunction(_Function):
    """RMS norm without weights; the result has the dtype of its input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False) -> Tensor:
        """Divide by the root of the mean square over the last dimensions."""
        return wide_rms_norm(input, normalized_shape, None, eps, input.dtype)


class FastLayerNormFN(_Function):
    """Layer norm over the last dimension with weights; the result has the dtype of its input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, memory_efficient: bool = False
    ) -> Tensor:
        """Normalise ``x``, shape ``(*, hidden)``, then multiply by ``gamma`` and add ``beta``, both ``(hidden,)``."""
        return wide_layer_norm(x, gamma.numel(), gamma, beta, epsilon, x.dtype)
