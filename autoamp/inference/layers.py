"""Linear and convolutional layers whose weights somebody promised not to write to: cast once, and packed where it pays.

On a CPU with bf16 units oneDNN wants weights in a layout of its own, and reorders plain ones at each call. Torch has
the two halves of that as ops, which its compiler uses; here the reordering is done once, with the cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from autoamp.casting import CastCache, cast_for_any_mode, serves_others
from autoamp.inference.packing import can_pack, image_strides, is_alike_in_both_directions, may_call_onednn
from autoamp.torch_private import mkldnn

__all__ = ["PinnedConv2d", "PinnedLayer", "PinnedLinear", "keep_with_pins", "lasting_casts", "pin_layer"]

# Torch hands a smaller product of matrices to no library, so packing it would take another kernel. Products somewhat
# larger gain less by a packed weight than the way to the kernel costs.
_SMALLEST = 16 * 16 * 16
# Convolutions whose weights have no more elements than this keep both forms, since either may serve.
_SMALL_WEIGHT = 1 << 16
# Outputs of a convolution up to this size, or an eighth of the weight's, are sooner copied than the weight reordered.
_SMALL_OUTPUT = 1 << 14


class PinnedLayer:
    """The casts of one layer's weight and bias. They are its own: nobody else gets them, so nobody writes to them.

    Args:
        op: The op whose weight it is.
        parameters: The weight, and the bias if there is one, in fp32.
        narrowed: Their casts, in the same order.
        x: The input of the first call.
        rest: What the op got beside these three, such as a convolution's stride.

    Attributes:
        op: The op whose weight it is.
        parameters: What was cast.
        bias: What was cast for a bias, to tell this layer from another use of its weight.
        narrow_bias: The cast of it.
        narrow_weight: The cast of the weight, None where there is only the packed one.
        packed: The weight in oneDNN's own layout, or None.
    """

    __slots__ = ("bias", "narrow_bias", "narrow_weight", "op", "packed", "parameters")

    def __init__(
        self, op: Any, parameters: tuple[Parameter, ...], narrowed: list[Tensor], x: Tensor, rest: Any
    ) -> None:
        self.op = op
        self.parameters = parameters
        self.bias = parameters[1] if len(parameters) > 1 else None
        self.narrow_bias = narrowed[1] if len(narrowed) > 1 else None
        self.narrow_weight: Tensor | None = narrowed[0]
        self.packed: Tensor | None = None
        # oneDNN does not broadcast a bias.
        if can_pack(narrowed[0]) and (self.narrow_bias is None or self.narrow_bias.shape == narrowed[0].shape[:1]):
            self._pack(narrowed[0], x, rest)

    def _pack(self, weight: Tensor, x: Tensor, rest: Any) -> None:
        """Set `packed` to the weight in oneDNN's layout, where that can serve and pays."""

    def run(self, x: Tensor, rest: tuple[Any, ...]) -> Tensor | None:
        """Return what the op returns for ``x``, by the packed weight; None where that cannot serve, or does not pay.

        Args:
            x: The input, in the dtype of the casts.
            rest: What the op got beside input, weight and bias.
        """
        return None


class PinnedLinear(PinnedLayer):
    """A linear layer."""

    __slots__ = ("width",)

    def _pack(self, weight: Tensor, x: Tensor, rest: Any) -> None:
        if mkldnn.linear is not None and weight.dim() == 2 and weight.numel() > _SMALLEST:
            self.width = weight.shape[1]
            self.narrow_weight = None
            self.packed = mkldnn.reorder_linear(weight)

    def run(self, x: Tensor, rest: tuple[Any, ...]) -> Tensor | None:
        """Return ``linear`` of ``x``, of shape ``(..., in_features)``."""
        if not may_call_onednn(x) or x.shape[-1:] != (self.width,):
            return None
        result: Tensor = mkldnn.linear(x, self.packed, self.narrow_bias, "none", [], "")
        return result


class PinnedConv2d(PinnedLayer):
    """A convolution of images: one that is the same in both directions, neither dilated nor in groups.

    Of others, and of some that leave one column of many, oneDNN's kernels for packed weights read memory that is not
    theirs: found by comparing tens of thousands of random ones with plain weights.

    By packed weights oneDNN returns ``channels_last``; a copy gives the caller the layout that it would get without.
    """

    __slots__ = ("known", "options", "rest", "size")

    def _pack(self, weight: Tensor, x: Tensor, rest: Any) -> None:
        if (
            mkldnn.conv is None
            or weight.dim() != 4
            or weight.shape[2] != weight.shape[3]
            or weight.stride() != image_strides(weight.shape)
            or not is_alike_in_both_directions(rest)
        ):
            return
        stride, padding, dilation, groups = self.rest = rest
        self.options = list(padding), list(stride), list(dilation), groups
        self.size = weight.shape
        # The last size of image that it served, and the strides that images of that size have.
        self.known: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        if self._pays(x.shape):
            # Packed for the numbers and the size of image that it is first used with.
            self.packed = mkldnn.reorder_conv(weight, *self.options, list(x.shape))
            if weight.numel() > _SMALL_WEIGHT:
                self.narrow_weight = None

    def run(self, x: Tensor, rest: tuple[Any, ...]) -> Tensor | None:
        """Return ``conv2d`` of ``x``, of shape ``(batch, channels, height, width)``."""
        if not may_call_onednn(x) or rest != self.rest:
            return None
        shape = x.shape
        known, strides = self.known
        if shape != known:
            if not self._pays(shape):
                return None
            strides = image_strides(shape)
            self.known = shape, strides
        if x.stride() != strides:
            return None
        result: Tensor = mkldnn.conv(x, self.packed, self.narrow_bias, *self.options, "none", [], "")
        return result.clone(memory_format=torch.contiguous_format)

    def _pays(self, shape: torch.Size) -> bool:
        """Tell whether this layer takes images of a shape, and whether the packed weight pays for them."""
        if len(shape) != 4 or shape[1] != self.size[1]:
            return False
        (padding, _), (stride, _), _, _ = self.options
        extents = [(extent + 2 * padding - self.size[2]) // stride + 1 for extent in shape[2:]]
        if stride > 1 and min(*extents, *shape[2:]) < 2:
            return False
        output = shape[0] * self.size[0] * max(0, extents[0]) * max(0, extents[1])
        return 0 < output <= max(_SMALL_OUTPUT, self.size.numel() // 8) or (output > 0 and self.narrow_weight is None)


_KINDS: dict[Any, Any] = {F.linear: PinnedLinear, torch.conv2d: PinnedConv2d}


def pin_layer(
    cache: CastCache,
    original: Any,
    narrow: Callable[[Tensor], Tensor],
    x: Tensor,
    weight: Parameter,
    bias: Parameter | None,
    rest: tuple[Any, ...],
) -> bool:
    """Cast the weight and bias of a layer at its first use, and keep the casts with the weight's pin.

    Args:
        cache: Whose pins hold the promise for both.
        original: The op.
        narrow: Casts a tensor to the half dtype.
        x: The op's input.
        weight: What it got for a weight: in fp32, and of a device and layout that casts apply to.
        bias: What it got for a bias, None for none.
        rest: What else it got.

    Returns:
        Whether the casts are kept: if both are promised to stay, and the weight serves no other layer.
    """
    parameters = (weight,) if bias is None else (weight, bias)
    pins: list[Any] = [cache.pins.get(id(parameter)) for parameter in parameters]
    narrowed = None if None in pins or pins[0].layer is not None else lasting_casts(parameters, narrow)
    if narrowed is None:
        return False
    with torch.inference_mode(False), torch.no_grad():
        layer = _KINDS.get(original, PinnedLayer)(original, parameters, narrowed, x, rest)
    return keep_with_pins(cache, layer, pins)


def keep_with_pins(cache: CastCache, layer: Any, pins: Sequence[Any]) -> bool:
    """Keep what was made of ``layer.parameters`` with the first one's pin, if their pins are still these."""
    with cache.lock:
        # Another thread may have ended the promise meanwhile.
        if any(cache.pins.get(id(parameter)) is not pin for parameter, pin in zip(layer.parameters, pins, strict=True)):
            return False
        pins[0].layer = layer
    return True


def lasting_casts(parameters: Sequence[Tensor], narrow: Callable[[Tensor], Tensor]) -> list[Tensor] | None:
    """Cast parameters so that the casts serve whoever comes later; None where they cannot."""
    if any(parameter.layout is not torch.strided for parameter in parameters):
        return None
    narrowed = [cast_for_any_mode(parameter, narrow) for parameter in parameters]
    return narrowed if all(map(serves_others, narrowed)) else None
