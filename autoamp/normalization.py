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


class FusedLayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` that takes half input beside fp32 weights.

    Args:
        normalized_shape: The shape of the last dimensions, over which the mean and the variance are taken; an int for
            the last one alone.
        eps: Added to the variance.
        elementwise_affine: Whether there are a weight and a bias, of shape ``normalized_shape``.
        memory_efficient: Has no effect: torch saves the input and two numbers for each row in any case.
        **factory: What else `torch.nn.LayerNorm` takes: ``bias``, ``device`` and ``dtype``.
    """

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

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, shape ``(*, *normalized_shape)``, in its own dtype."""
        return _layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, input.dtype)


class MixedFusedLayerNorm(FusedLayerNorm):
    """`FusedLayerNorm` whose output has the dtype of its weights.

    Raises:
        UsageError: ``elementwise_affine=False``.
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *, memory_efficient: bool = False, **factory: Any
    ) -> None:
        _check_affine(type(self).__name__, factory.pop("elementwise_affine", True))
        super().__init__(normalized_shape, eps, True, memory_efficient, **factory)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, shape ``(*, *normalized_shape)``, in the weights' dtype."""
        return _layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, self.weight.dtype)


class FusedRMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` that takes half input beside fp32 weights.

    Arguments as for `FusedLayerNorm`, but there is no bias, and ``eps`` is added to the mean square.
    """

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

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, shape ``(*, *normalized_shape)``, in its own dtype."""
        return _rms_norm(input, self.normalized_shape, self.weight, self.eps, input.dtype)


class MixedFusedRMSNorm(FusedRMSNorm):
    """`FusedRMSNorm` whose output has the dtype of its weights.

    Raises:
        UsageError: ``elementwise_affine=False``.
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *, memory_efficient: bool = False, **factory: Any
    ) -> None:
        _check_affine(type(self).__name__, factory.pop("elementwise_affine", True))
        super().__init__(normalized_shape, eps, True, memory_efficient, **factory)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, shape ``(*, *normalized_shape)``, in the weights' dtype."""
        return _rms_norm(input, self.normalized_shape, self.weight, self.eps, self.weight.dtype)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the layer norm over the last dimensions, without weights, in the dtype of ``input``."""
    return _layer_norm(input, normalized_shape, None, None, eps, input.dtype)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the layer norm over the last dimensions, times ``weight`` plus ``bias``, in the dtype of ``input``."""
    return _layer_norm(input, normalized_shape, weight, bias, eps, input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return what `fused_layer_norm_affine` does, in the dtype of ``weight``."""
    return _layer_norm(input, normalized_shape, weight, bias, eps, weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Return ``input`` divided by the root of its mean square over the last dimensions, in its own dtype."""
    return _rms_norm(input, normalized_shape, None, eps, input.dtype)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `fused_rms_norm` times ``weight``, in the dtype of ``input``."""
    return _rms_norm(input, normalized_shape, weight, eps, input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return what `fused_rms_norm_affine` does, in the dtype of ``weight``."""
    return _rms_norm(input, normalized_shape, weight, eps, weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMS norm in the dtype of ``weight``, also within `torch.autocast`.

    Without a weight (None) the dtype is that of ``input``.
    """
    return wide_rms_norm(input, normalized_shape, weight, eps, input.dtype if weight is None else weight.dtype)


def _check_affine(name: str, affine: bool) -> None:
    if not affine:
        raise UsageError(
            f"{name} got elementwise_affine=False, but its output has its weights' dtype; use the plain norm"
        )


def wide_layer_norm(
    input: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return the layer norm over the last dimensions, ``shape``, in ``dtype``, also within `torch.autocast`."""
    input = _wide(input)
    return F.layer_norm(input, _dimensions(shape), _as(weight, input), _as(bias, input), eps).to(dtype)


def wide_rms_norm(input: Tensor, shape: Shape, weight: Tensor | None, eps: float | None, dtype: torch.dtype) -> Tensor:
    """Return the RMS norm over the last dimensions, ``shape``, in ``dtype``, also within `torch.autocast`.

    ``eps`` None is torch's default.
    """
    input = _wide(input)
    return F.rms_norm(input, _dimensions(shape), _as(weight, input), eps).to(dtype)


def _layer_norm(
    input: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    return wide_layer_norm(input, shape, weight, bias, eps, _autocast(input, dtype))


def _rms_norm(input: Tensor, shape: Shape, weight: Tensor | None, eps: float | None, dtype: torch.dtype) -> Tensor:
    return wide_rms_norm(input, shape, weight, eps, _autocast(input, dtype))


def _autocast(input: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the `torch.autocast` region that the call is in; outside, or for fp64 input, ``dtype``."""
    kind = input.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and input.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return dtype


def _wide(tensor: Tensor) -> Tensor:
    """Return a half tensor in fp32, any other as it is. Integers are left to torch's norms, which refuse them."""
    return tensor if tensor.dtype is torch.float64 or not tensor.is_floating_point() else tensor.float()


def _as(weight: Tensor | None, input: Tensor) -> Tensor | None:
    """Return a weight in the dtype of the input: torch's layer norm wants both in one dtype."""
    return weight if weight is None or weight.dtype is input.dtype else weight.to(input.dtype)


def _dimensions(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)
