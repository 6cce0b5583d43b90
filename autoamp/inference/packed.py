"""Ops with pinned weights on a CPU with bf16 units: the weights are cast and packed once, where that pays.

oneDNN wants weights in a layout of its own, and reorders plain ones at each call. Torch has the two halves of that as
ops, which its compiler uses. Convolutions are left out: for some of them oneDNN's kernels for packed weights read
memory that is not theirs. The casts of a pinned weight that is not packed are kept by `autoamp.casting.CastCache`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from autoamp.casting import CastCache, CastState, cast_for_any_mode, is_cacheable
from autoamp.inference.lstm import PackedLSTM
from autoamp.inference.packing import Packed, can_pack, may_call_onednn
from autoamp.torch_private import mkldnn

# Torch hands a smaller product of matrices to no library, so packing it would take another kernel. Products somewhat
# larger gain less by a packed weight than the way to the kernel costs.
_SMALLEST = 16 * 16 * 16


class PackedLinear(Packed):
    """A linear layer."""

    def __init__(self, parameters: tuple[Parameter, ...], narrowed: list[Tensor], args: tuple[Any, ...]) -> None:
        super().__init__(parameters, narrowed, args)
        self._width, self._bias = narrowed[0].shape[1], narrowed[1] if len(narrowed) > 1 else None
        self._packed = mkldnn.reorder_linear(narrowed[0])

    @staticmethod
    def fits(weights: Sequence[Any], args: tuple[Any, ...]) -> bool:
        """Whether the weight is a matrix that is large enough."""
        is_large = weights[0].dim() == 2 and weights[0].numel() > _SMALLEST
        # oneDNN does not broadcast a bias.
        has_its_bias = len(weights) < 2 or weights[1].shape == weights[0].shape[:1]
        return mkldnn.linear is not None and is_large and has_its_bias

    def run(self, args: tuple[Any, ...], narrow: Callable[[Tensor], Tensor]) -> Any:
        """Return ``linear`` of the first argument, of shape ``(..., in_features)``."""
        x = args[0]
        if x.shape[-1:] != (self._width,):
            return NotImplemented
        return mkldnn.linear(narrow(x), self._packed, self._bias, "none", [], "")


PACKED: dict[Any, type[PackedLinear | PackedLSTM]] = {F.linear: PackedLinear, torch.lstm: PackedLSTM}
"""By op."""


def build_packed(op: Any, casts: CastState) -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
    """Return what calls an op with packed weights while these are pinned; None for an op that none are packed for.

    It takes the arguments of a call, and returns NotImplemented where the call is to be made without packed weights.
    """
    kind, cache = PACKED.get(op), casts.cache
    if kind is None or casts.device_type != "cpu" or casts.dtype is not torch.bfloat16:
        return None
    pins = cache.pins

    def narrow(x: Tensor) -> Tensor:
        return x if x.dtype is torch.bfloat16 else x.bfloat16()

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled() or len(args) < 2:
            return NotImplemented
        weights = kind.weights_of(args)
        pin = pins.get(id(weights[0])) if weights else None
        if pin is None or type(args[0]) is not Tensor or not may_call_onednn(args[0]):
            return NotImplemented
        layer = _packed(cache, kind, weights, args, casts.narrow) if pin.layer is None else pin.layer
        # A weight may serve several ops, or one with several biases: the first that it was packed for is served.
        if type(layer) is not kind or len(weights) != len(layer.parameters):
            return NotImplemented
        return layer.run(args, narrow) if all(map(operator.is_, weights, layer.parameters)) else NotImplemented

    return call


def _packed(
    cache: CastCache,
    kind: type[PackedLinear | PackedLSTM],
    weights: tuple[Any, ...],
    args: tuple[Any, ...],
    convert: Any,
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
        if all(map(is_cacheable, narrowed)) and all(map(can_pack, narrowed)):
            with torch.inference_mode(False), torch.no_grad():
                layer = kind(weights, narrowed, args)
    with cache.lock:
        # Another thread may have ended the promise meanwhile.
        if any(cache.pins.get(id(weight)) is not pin for weight, pin in zip(weights, pins, strict=True)):
            return None
        pins[0].layer = Packed((), [], args) if layer is None else layer
    return layer
