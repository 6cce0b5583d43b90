"""Layer and RMS norms with the signatures of `apex.normalization`, on torch's own functions.

All compute in fp32, or in fp64 where the input is in that, and take weights of any floating dtype. The result has the
shape of the input. Its dtype is that of the input; with the mixed norms and `manual_rms_norm` it is that of the
weights. Within `torch.autocast` it is autocast's, unless the input is in fp64. `manual_rms_norm`, `wide_layer_norm` and
`wide_rms_norm` do not heed `torch.autocast`.

``normalized_shape`` is the shape of the last dimensions, over which is normalised, or an int for the last one alone;
weights and biases have that shape. ``memory_efficient`` has no effect and exists because Apex has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoamp.errors import UsageError

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
    "wide_layer_norm",
    "wide_rms_norm",
]

Shape = int | Sequence[int]


class _Fused(torch.nn.Module):
    """The constructor of a fused norm, before torch's norm among the base classes."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, **factory)
        self.memory_efficient = memory_efficient


class _Mixed(torch.nn.Module):
    """The constructor of a norm whose output has the dtype of its weights: it has weights."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *, memory_efficient: bool = False, **factory: Any
    ) -> None:
        if not factory.pop("elementwise_affine", True):
            raise UsageError(
                f"{type(self).__name__} got elementwise_affine=False, but its output takes the dtype of its weights; "
                "use the norm without 'Mixed'"
            )
        super().__init__(normalized_shape, eps, True, memory_efficient, **factory)


class FusedLayerNorm(_Fused, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` that takes half input beside fp32 weights.

    Args:
        normalized_shape: The shape of the last dimensions, over which the mean and the variance are taken; an int for
            the last one alone.
        eps: Added to the variance.
        elementwise_affine: Whether there are a weight and a bias, of shape ``normalized_shape``.
        memory_efficient: Has no effect: torch saves the input and two numbers for each row in any case.
        **factory: What else `torch.nn.LayerNorm` takes: ``bias``, ``device`` and ``dtype``.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, shape ``(*, *normalized_shape)``, in its own dtype."""
        return wide_layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, _dtype(input))


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """`FusedLayerNorm` whose output has the dtype of its weights.

    Args:
        normalized_shape: The last dimensions, over which it is taken; an int for the last one alone.
        eps: Added to the variance.
        memory_efficient: Has no effect, as for `FusedLayerNorm`.
        **factory: What else `torch.nn.LayerNorm` takes: ``bias``, ``device`` and ``dtype``.

    Raises:
        UsageError: ``elementwise_affine=False``.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, shape ``(*, *normalized_shape)``, in the weights' dtype."""
        return wide_layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, _dtype(input, self.weight)
        )


class FusedRMSNorm(_Fused, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` that takes half input beside fp32 weights.

    Args:
        normalized_shape: The last dimensions, over which the mean square is taken; an int for the last one alone.
        eps: Added to the mean square.
        elementwise_affine: Whether there is a weight, of shape ``normalized_shape``; there is no bias.
        memory_efficient: Has no effect, as for `FusedLayerNorm`.
        **factory: What else `torch.nn.RMSNorm` takes: ``device`` and ``dtype``.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, shape ``(*, *normalized_shape)``, in its own dtype."""
        return wide_rms_norm(input, self.normalized_shape, self.weight, self.eps, _dtype(input))


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """`FusedRMSNorm` whose output has the dtype of its weights.

    Args:
        normalized_shape: The last dimensions, over which it is taken; an int for the last one alone.
        eps: Added to the mean square.
        memory_efficient: Has no effect, as for `FusedLayerNorm`.
        **factory: What else `torch.nn.RMSNorm` takes: ``device`` and ``dtype``.

    Raises:
        UsageError: ``elementwise_affine=False``.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, shape ``(*, *normalized_shape)``, in the weights' dtype."""
        return wide_rms_norm(input, self.normalized_shape, self.weight, self.eps, _dtype(input, self.weight))


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the layer norm over the last dimensions, without weights, in the dtype of ``input``.

    Args:
        input: Floating, of shape ``(*, *normalized_shape)``; half tensors are computed in fp32.
        normalized_shape: The last dimensions, over which it is taken; an int for the last one alone.
        eps: Added to the variance.
        memory_efficient: Has no effect, as for `FusedLayerNorm`.

    Returns:
        A tensor of the shape of ``input``. Within `torch.autocast` its dtype is that of autocast.
    """
    return wide_layer_norm(input, normalized_shape, None, None, eps, _dtype(input))


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the layer norm over the last dimensions, times ``weight`` plus ``bias``, in the dtype of ``input``.

    Args:
        input: Floating, of shape ``(*, *normalized_shape)``; half tensors are computed in fp32.
        weight: The factors, floating, of shape ``normalized_shape``.
        bias: The addends, of that shape and dtype.
        normalized_shape: The last dimensions, over which it is taken; an int for the last one alone.
        eps: Added to the variance.
        memory_efficient: Has no effect, as for `FusedLayerNorm`.

    Returns:
        A tensor of the shape of ``input``. Within `torch.autocast` its dtype is that of autocast.
    """
    return wide_layer_norm(input, normalized_shape, weight, bias, eps, _dtype(input))


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return what `fused_layer_norm_affine` does, in the dtype of ``weight``.

    Args:
        input: Floating, of shape ``(*, *normalized_shape)``; half tensors are computed in fp32.
        weight: The factors, floating, of shape ``normalized_shape``.
        bias: The addends, of that shape and dtype.
        normalized_shape: The last dimensions, over which it is taken; an int for the last one alone.
        eps: Added to the variance.
        memory_efficient: Has no effect, as for `FusedLayerNorm`.

    Returns:
        A tensor of the shape of ``input``. Within `torch.autocast` its dtype is that of autocast.
    """
    return wide_layer_norm(input, normalized_shape, weight, bias, eps, _dtype(input, weight))


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Return ``input`` divided by the root of its mean square over the last dimensions, in its own dtype.

    Args:
        input: Floating, of shape ``(*, *normalized_shape)``; half tensors are computed in fp32.
        normalized_shape: The last dimensions, over which it is taken; an int for the last one alone.
        eps: Added to the mean square.
        memory_efficient: Has no effect, as for `FusedLayerNorm`.

    Returns:
        A tensor of the shape of ``input``. Within `torch.autocast` its dtype is that of autocast.
    """
    return wide_rms_norm(input, normalized_shape, None, eps, _dtype(input))


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `fused_rms_norm` times ``weight``, in the dtype of ``input``.

    Args:
        input: Floating, of shape ``(*, *normalized_shape)``; half tensors are computed in fp32.
        weight: The factors, floating, of shape ``normalized_shape``.
        normalized_shape: The last dimensions, over which it is taken; an int for the last one alone.
        eps: Added to the mean square.
        memory_efficient: Has no effect, as for `FusedLayerNorm`.

    Returns:
        A tensor of the shape of ``input``. Within `torch.autocast` its dtype is that of autocast.
    """
    return wide_rms_norm(input, normalized_shape, weight, eps, _dtype(input))


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return what `fused_rms_norm_affine` does, in the dtype of ``weight``.

    Args:
        input: Floating, of shape ``(*, *normalized_shape)``; half tensors are computed in fp32.
        weight: The factors, floating, of shape ``normalized_shape``.
        normalized_shape: The last dimensions, over which it is taken; an int for the last one alone.
        eps: Added to the mean square.
        memory_efficient: Has no effect, as for `FusedLayerNorm`.

    Returns:
        A tensor of the shape of ``input``. Within `torch.autocast` its dtype is that of autocast.
    """
    return wide_rms_norm(input, normalized_shape, weight, eps, _dtype(input, weight))


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMS norm in the dtype of ``weight``, also within `torch.autocast`.

    Args:
        input: Floating, of shape ``(*, *normalized_shape)``; half tensors are computed in fp32.
        normalized_shape: The last dimensions, over which it is taken; an int for the last one alone.
        weight: The factors, floating, of shape ``normalized_shape``. None for none: the dtype is that of ``input``.
        eps: Added to the mean square.
    """
    return wide_rms_norm(input, normalized_shape, weight, eps, input.dtype if weight is None else weight.dtype)


def wide_layer_norm(
    input: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return the layer norm over the last dimensions, ``shape``, in ``dtype``, also within `torch.autocast`.

    Args:
        input: Floating, of shape ``(*, *shape)``; half tensors are computed in fp32.
        shape: The last dimensions, over which it is taken; an int for the last one alone.
        weight: The factors, of shape ``shape``; None for none.
        bias: The addends, of shape ``shape``; None for none.
        eps: Added to the variance.
        dtype: That of the result.
    """
    input = _wide(input)
    return F.layer_norm(input, _dimensions(shape), _as(weight, input), _as(bias, input), eps).to(dtype)


def wide_rms_norm(input: Tensor, shape: Shape, weight: Tensor | None, eps: float | None, dtype: torch.dtype) -> Tensor:
    """Return the RMS norm over the last dimensions, ``shape``, in ``dtype``, also within `torch.autocast`.

    Args:
        input: Floating, of shape ``(*, *shape)``; half tensors are computed in fp32.
        shape: The last dimensions, over which it is taken; an int for the last one alone.
        weight: The factors, of shape ``shape``; None for none.
        eps: Added to the mean square; None is torch's default.
        dtype: That of the result.
    """
    input = _wide(input)
    return F.rms_norm(input, _dimensions(shape), _as(weight, input), eps).to(dtype)


def _dtype(input: Tensor, weight: Tensor | None = None) -> torch.dtype:
    """Return the dtype of the `torch.autocast` region that the call is in.

    Outside, or for fp64 input, it is that of ``weight``, or of ``input`` where no weight is given.
    """
    kind = input.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and input.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return input.dtype if weight is None else weight.dtype


def _wide(tensor: Tensor) -> Tensor:
    """Return a half tensor in fp32, any other as it is. Integers are left to torch's norms, which refuse them."""
    return tensor if tensor.dtype is torch.float64 or not tensor.is_floating_point() else tensor.float()


def _as(weight: Tensor | None, input: Tensor) -> Tensor | None:
    """Return a weight in the dtype of the input: torch's layer norm wants both in one dtype."""
    return weight if weight is None or weight.dtype is input.dtype else weight.to(input.dtype)


def _dimensions(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


class NormFunction:
    """Gives ``forward`` the way in by ``apply`` that an autograd function has.

    Megatron and programs derived from it call that, and look at the arguments of ``forward`` to learn whether it takes
    ``memory_efficient``. These call torch's norms, so second derivatives work too. They pay no heed to
    `torch.autocast`, and ``ctx`` has no effect.
    """

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Tensor:
        """Return what ``forward`` does, given its arguments but for ``ctx``."""
        result: Tensor = cls.forward(None, *args, **kwargs)  # type: ignore[attr-defined]
        return result


class FusedLayerNormAffineFunction(NormFunction):
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


class FusedLayerNormFunction(NormFunction):
    """Layer norm without weights; the result has the dtype of its input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False) -> Tensor:
        """Normalise over the last dimensions."""
        return wide_layer_norm(input, normalized_shape, None, None, eps, input.dtype)


class FusedRMSNormAffineFunction(NormFunction):
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


class FusedRMSNormFunction(NormFunction):
    """RMS norm without weights; the result has the dtype of its input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False) -> Tensor:
        """Divide by the root of the mean square over the last dimensions."""
        return wide_rms_norm(input, normalized_shape, None, eps, input.dtype)
