"""Layers with pinned weights on a CPU with bf16 units: the weights are cast and packed once, where that pays.

oneDNN wants weights in a layout of its own, and reorders plain ones at each call. Torch has the two halves of that as
ops, which its compiler uses. The casts of a pinned weight that is not packed are kept by `autoamp.casting.CastCache`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from autoamp.casting import CastCache, Casts, cast_for_any_mode, serves_others
from autoamp.inference.lstm import PackedLSTM
from autoamp.inference.packing import can_pack, image_strides, is_alike_in_both_directions, may_call_onednn
from autoamp.torch_private import mkldnn

__all__ = ["PackedConv2d", "PackedLinear", "build_packed"]

# Torch hands a smaller product of matrices to no library, so packing it would take another kernel. Products somewhat
# larger gain less by a packed weight than the way to the kernel costs.
_SMALLEST = 16 * 16 * 16
# Convolutions whose weights have no more elements than this keep both forms, since either may serve.
_SMALL_WEIGHT = 1 << 16
# Outputs of a convolution up to this size, or an eighth of the weight's, are sooner copied than the weight reordered.
_SMALL_OUTPUT = 1 << 14


class Packed(Protocol):
    """The packed weights of one layer, kept with the pin of the first weight while all are pinned.

    Attributes:
        parameters: What was cast and packed.
    """

    parameters: tuple[Parameter, ...]

    @staticmethod
    def weights_of(args: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the weights and biases among the arguments of the op; None where these cannot be packed."""

    @staticmethod
    def fits(weights: Sequence[Any], args: Sequence[Any]) -> bool:
        """Tell whether packed weights can serve the op, and pay."""

    def __init__(self, parameters: tuple[Parameter, ...], narrowed: list[Tensor], args: Sequence[Any]) -> None:
        """Pack casts of the weights and biases."""

    def run(self, args: Sequence[Any], narrow: Callable[[Tensor], Tensor]) -> Any:
        """Return what the op returns; None where the packed weights cannot serve, or do not pay."""


class PackedLinear:
    """A linear layer."""

    __slots__ = ("bias", "packed", "parameters", "width")

    def __init__(self, parameters: tuple[Parameter, ...], narrowed: list[Tensor], args: Sequence[Any]) -> None:
        self.parameters = parameters
        self.width = narrowed[0].shape[1]
        self.packed = mkldnn.reorder_linear(narrowed[0])
        self.bias = narrowed[1] if len(narrowed) > 1 else None

    @staticmethod
    def weights_of(args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the weight, and the bias if there is one."""
        return _weight_and_bias(args)

    @staticmethod
    def fits(weights: Sequence[Any], args: Sequence[Any]) -> bool:
        """Tell whether the weight is a matrix that is large enough."""
        is_large = weights[0].dim() == 2 and weights[0].numel() > _SMALLEST
        return mkldnn.linear is not None and is_large and _bias_fits(weights)

    def run(self, args: Sequence[Any], narrow: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return ``linear`` of the first argument, of shape ``(..., in_features)``."""
        x = args[0]
        if x.shape[-1:] != (self.width,):
            return None
        result: Tensor = mkldnn.linear(narrow(x), self.packed, self.bias, "none", [], "")
        return result


class PackedConv2d:
    """A convolution of images: one that is the same in both directions, neither dilated nor in groups.

    Of others, and of some that leave one column of many, oneDNN's kernels for packed weights read memory that is not
    theirs: found by comparing tens of thousands of random ones with plain weights.

    By packed weights oneDNN returns ``channels_last``; a copy gives the caller the layout that it would get without.
    """

    __slots__ = ("bias", "known", "options", "packed", "parameters", "rest", "size")

    def __init__(self, parameters: tuple[Parameter, ...], narrowed: list[Tensor], args: Sequence[Any]) -> None:
        self.parameters = parameters
        self.size = narrowed[0].shape
        self.rest = stride, padding, dilation, groups = tuple(args[3:])
        self.options = list(padding), list(stride), list(dilation), groups
        # Packed for the numbers and the size of image that it is first used with.
        self.packed = mkldnn.reorder_conv(narrowed[0], *self.options, list(args[0].shape))
        self.bias = narrowed[1] if len(narrowed) > 1 else None
        # The last size of image that it served, and the strides that images of that size have.
        self.known: tuple[tuple[int, ...], tuple[int, ...]] = (), ()

    @staticmethod
    def weights_of(args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the weight, and the bias if there is one."""
        return _weight_and_bias(args)

    @staticmethod
    def fits(weights: Sequence[Any], args: Sequence[Any]) -> bool:
        """Tell whether the packed weight can serve, and pays for images of this size."""
        weight, rest = weights[0], tuple(args[3:])
        return (
            mkldnn.conv is not None
            and weight.dim() == 4
            and weight.shape[2] == weight.shape[3]
            and weight.stride() == image_strides(weight.shape)
            and is_alike_in_both_directions(rest)
            and _bias_fits(weights)
            and _pays(weight.shape, args[0].shape, *rest[:2])
        )

    def run(self, args: Sequence[Any], narrow: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return ``conv2d`` of the first argument, of shape ``(batch, channels, height, width)``."""
        x, shape = args[0], args[0].shape
        if tuple(args[3:]) != self.rest:
            return None
        known, strides = self.known
        if shape != known:
            if not _pays(self.size, shape, *self.rest[:2], is_packed=True):
                return None
            strides = image_strides(shape)
            self.known = shape, strides
        if x.stride() != strides:
            return None
        result: Tensor = mkldnn.conv(narrow(x), self.packed, self.bias, *self.options, "none", [], "")
        return result.clone(memory_format=torch.contiguous_format)


def _pays(size: torch.Size, shape: torch.Size, stride: Any, padding: Any, *, is_packed: bool = False) -> bool:
    """Tell whether a convolution takes images of a shape, and whether the packed weight, of ``size``, pays for them.

    Of a large weight that is packed there is no other form, so that it always serves.
    """
    if len(shape) != 4 or shape[1] != size[1]:
        return False
    extents = [(extent + 2 * padding[0] - size[2]) // stride[0] + 1 for extent in shape[2:]]
    if stride[0] > 1 and min(*extents, *shape[2:]) < 2:
        return False
    output = shape[0] * size[0] * max(0, extents[0]) * max(0, extents[1])
    is_small = output <= max(_SMALL_OUTPUT, size.numel() // 8)
    return output > 0 and (is_small or (is_packed and size.numel() > _SMALL_WEIGHT))


def _weight_and_bias(args: Sequence[Any]) -> tuple[Any, ...]:
    return (args[1], args[2]) if len(args) > 2 and args[2] is not None else (args[1],)


def _bias_fits(weights: Sequence[Any]) -> bool:
    # oneDNN does not broadcast a bias.
    return len(weights) < 2 or weights[1].shape == weights[0].shape[:1]


_KINDS: dict[Any, type[Packed]] = {F.linear: PackedLinear, torch.conv2d: PackedConv2d, torch.lstm: PackedLSTM}
"""By op."""


def build_packed(op: Any, casts: Casts) -> Callable[[tuple[Any, ...]], Any] | None:
    """Return what calls an op with packed weights while these are pinned; None for an op that none are packed for.

    It takes the arguments of a call, by position, and returns None where the call is to be made without packed weights.
    """
    kind, cache = _KINDS.get(op), casts.cache
    if kind is None or casts.device_type != "cpu" or casts.dtype is not torch.bfloat16:
        return None
    pins, place = cache.pins, 2 if op is torch.lstm else 1

    def narrow(x: Tensor) -> Tensor:
        return x if x.dtype is torch.bfloat16 else x.bfloat16()

    def call(args: tuple[Any, ...]) -> Any:
        if torch.compiler.is_dynamo_compiling() or len(args) <= place or type(x := args[0]) is not Tensor:
            return None
        first = args[place]
        pin = pins.get(id(first[0] if type(first) is list and first else first))
        if pin is None or torch.is_grad_enabled() or not may_call_onednn(x):
            return None
        layer, weights = pin.layer, kind.weights_of(args)
        if weights is None:
            return None
        if layer is None:
            layer = _packed(cache, kind, weights, args, casts.narrow)
        # A weight may serve several ops, or one with several biases: the first that it was packed for is served.
        is_its_own = type(layer) is kind and len(weights) == len(layer.parameters)
        return layer.run(args, narrow) if is_its_own and all(map(operator.is_, weights, layer.parameters)) else None

    return call


def _packed(
    cache: CastCache, kind: type[Packed], weights: tuple[Any, ...], args: tuple[Any, ...], convert: Any
) -> Packed | None:
    """Cast and pack the weights of a layer, and keep that with the first one's pin; None where that cannot be."""
    pins: list[Any] = [cache.pins.get(id(weight)) for weight in weights]
    plain = all(
        type(weight) is Parameter and weight.dtype is torch.float32 and weight.layout is torch.strided
        for weight in weights
    )
    layer: Packed | None = None
    if None not in pins and plain and kind.fits(weights, args):
        narrowed = [cast_for_any_mode(weight, convert) for weight in weights]
        if all(map(serves_others, narrowed)) and all(map(can_pack, narrowed)):
            with torch.inference_mode(False), torch.no_grad():
                layer = kind(weights, narrowed, args)
    with cache.lock:
        # Another thread may have ended the promise meanwhile.
        if any(cache.pins.get(id(weight)) is not pin for weight, pin in zip(weights, pins, strict=True)):
            return None
        pins[0].layer = NotPacked if layer is None else layer
    return layer


class NotPacked:
    """Stands with the pin of a weight that is not packed, so that nobody tries again."""

    parameters = ()
