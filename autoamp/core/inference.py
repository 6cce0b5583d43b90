"""Pinned weights, which are promised to stay, on a CPU with bf16 units: cast and packed once, where that pays.

oneDNN wants weights in a layout of its own, which only its kernels read, and reorders plain ones at each call: those of
an LSTM of width 512 take more time than all the rest of it. Torch has the two halves of that as ops, which its compiler
uses. Convolutions are left out: for some of them oneDNN's kernels for packed weights read memory that is not theirs.
The casts of a pinned weight that is not packed are kept by `autoamp.core.CastCache`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from autoamp.core.casts import CastCache, CastState, cast_for_any_mode, is_cacheable
from autoamp.torch_private import (
    is_any_autocast_enabled,
    is_intercepted,
    is_transformed,
    mkldnn,
    mkldnn_enabled,
    tracing_state,
)

# Torch hands a smaller product of matrices to no library, so packing it would take another kernel. Products somewhat
# larger gain less by a packed weight than the way to the kernel costs.
_SMALLEST = 16 * 16 * 16
_DTYPES = (torch.bfloat16, torch.float32)
# oneDNN's number for an LSTM, in torch's own numbering of recurrent layers, and the weights and biases of a layer.
_LSTM, _TENSORS = 2, 4


class _Packed:
    """The packed weights of one layer, kept with the pin of the first weight while all are pinned.

    An object of this class itself has none, and stands with the pin of a weight that cannot be packed.

    Attributes:
        parameters: The weights and biases that were cast and packed.
    """

    parameters: tuple[Parameter, ...] = ()


class _PackedLinear(_Packed):
    """A linear layer. A small weight is cast and not packed: torch's own op is called with the casts at once.

    Args:
        parameters: The weight, and the bias where there is one.
        narrowed: Their casts, in the same order.
        args: The arguments of the op's first call.
    """

    def __init__(self, parameters: tuple[Parameter, ...], narrowed: list[Tensor], args: tuple[Any, ...]) -> None:
        self.parameters = parameters
        self._weight, self._bias = narrowed[0], narrowed[1] if len(narrowed) > 1 else None
        self._packed = mkldnn.reorder_linear(self._weight) if self._weight.numel() > _SMALLEST else None

    @staticmethod
    def weights_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the weight and the bias among two or more arguments of the op."""
        return (args[1], args[2]) if len(args) > 2 and args[2] is not None else (args[1],)

    @staticmethod
    def fits(weights: Sequence[Any], args: tuple[Any, ...]) -> bool:
        """Whether the weight is a matrix, and the bias one that oneDNN takes, which does not broadcast it."""
        has_its_bias = len(weights) < 2 or weights[1].shape == weights[0].shape[:1]
        return mkldnn.linear is not None and weights[0].dim() == 2 and has_its_bias

    def run(self, linear: Any, args: tuple[Any, ...]) -> Any:
        """Return ``linear`` of the first argument, of shape ``(..., in_features)``."""
        x = args[0]
        if self._packed is None:
            # Modes see torch's own op here. `torch.jit.trace` would record the casts as constants.
            is_plain = type(x) is Tensor and x.is_cpu and x.dtype in _DTYPES and x.layout is torch.strided
            if not is_plain or is_any_autocast_enabled() or tracing_state() is not None:
                return NotImplemented
            return linear(x.bfloat16(), self._weight, self._bias)
        if not _may_call_onednn(x) or x.shape[-1:] != self._weight.shape[1:]:
            return NotImplemented
        return mkldnn.linear(x.bfloat16(), self._packed, self._bias, "none", [], "")


class _PackedLSTM(_Packed):
    """An LSTM of one or more layers, of one direction or two: as `torch.lstm` runs it, with packed weights.

    Args:
        parameters: The weights and biases of all layers.
        narrowed: Their casts, in the same order.
        args: The arguments of the op's first call.
    """

    def __init__(self, parameters: tuple[Parameter, ...], narrowed: list[Tensor], args: tuple[Any, ...]) -> None:
        self.parameters = parameters
        x, directions = args[0], 1 + bool(args[7])
        self._columns, self._width = narrowed[0].shape[1], narrowed[1].shape[1]
        self._layers: list[tuple[Tensor, ...]] = []
        for start in range(0, len(narrowed), _TENSORS):
            of_input, of_hidden, *biases = narrowed[start : start + _TENSORS]
            reverse = start // _TENSORS % directions == 1
            # Packed for the lengths that it is first used with.
            size = [x.shape[0], x.shape[1], of_input.shape[1]]
            self._layers.append(
                (*mkldnn.reorder_lstm(of_input, of_hidden, self._width, reverse, True, False, size), *biases)
            )

    @staticmethod
    def weights_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return weights and biases of all layers; none for a packed sequence, whose sizes come second.

        Args:
            args: Of `torch.lstm`: input, hidden states, weights, has_biases, num_layers, dropout, training,
                bidirectional, batch_first.
        """
        if len(args) != 9 or type(args[2]) is not list or type(args[1]) is not tuple or len(args[1]) != 2:
            return ()
        x, states, weights, has_biases, layers, dropout, training, bidirectional, _ = args
        fits = has_biases and not (dropout and training) and len(weights) == _TENSORS * layers * (1 + bidirectional)
        tensors = (x, *states)
        plain = all(_may_call_onednn(one) and one.dim() == 3 for one in tensors)
        return tuple(weights) if fits and plain else ()

    @staticmethod
    def fits(weights: Sequence[Any], args: tuple[Any, ...]) -> bool:
        """Whether these are the weights and biases of layers that follow each other."""
        if mkldnn.lstm is None or weights[0].dim() != 2:
            return False
        (rows, columns), width, directions = weights[0].shape, weights[0].shape[0] // 4, 1 + bool(args[7])
        for start in range(0, len(weights), _TENSORS):
            if start >= _TENSORS * directions:
                columns = width * directions
            shapes = [tuple(weight.shape) for weight in weights[start : start + _TENSORS]]
            if shapes != [(rows, columns), (rows, width), (rows,), (rows,)]:
                return False
        return True

    def run(self, lstm: Any, args: tuple[Any, ...]) -> Any:
        """Return what `torch.lstm` returns; NotImplemented where shapes do not fit.

        The input is ``(length, batch, columns)``, or with ``batch_first`` ``(batch, length, columns)``; both states
        are ``(layers * directions, batch, width)``.
        """
        x, (h, c), count, bidirectional, batch_first = args[0], args[1], args[4], bool(args[7]), args[8]
        directions = 1 + bidirectional
        expected = len(self._layers), x.shape[0 if batch_first else 1], self._width
        if x.shape[2] != self._columns or x.numel() == 0 or h.shape != expected or c.shape != expected:
            return NotImplemented
        y = (x.transpose(0, 1) if batch_first else x).bfloat16().contiguous()
        states = h.bfloat16().contiguous().unbind(), c.bfloat16().contiguous().unbind()
        last: list[tuple[Tensor, Tensor]] = []
        for number in range(count):
            outputs = []
            for direction in range(directions):
                index = number * directions + direction
                output, next_h, next_c, _ = mkldnn.lstm(
                    y, *self._layers[index], states[0][index], states[1][index], direction == 1, [], _LSTM,
                    self._width, count, True, bidirectional, False, False,
                )  # fmt: skip
                outputs.append(output)
                last.append((next_h, next_c))
            y = torch.cat(outputs, -1) if bidirectional else outputs[0]
        return y.transpose(0, 1) if batch_first else y, *map(torch.stack, zip(*last, strict=True))


PACKED: dict[Any, type[_PackedLinear | _PackedLSTM]] = {F.linear: _PackedLinear, torch.lstm: _PackedLSTM}
"""By op."""


def build_packed(op: Any, casts: CastState) -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
    """Return what calls an op with packed weights while these are pinned; None for an op that none are packed for.

    It takes the arguments of a call, and returns NotImplemented where the call is to be made without packed weights.
    """
    kind, cache = PACKED.get(op), casts.cache
    if kind is None or casts.device_type != "cpu" or casts.dtype is not torch.bfloat16:
        return None
    pins, compiling = cache.pins, torch.compiler.is_dynamo_compiling

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or compiling() or torch.is_grad_enabled() or len(args) < 2:
            return NotImplemented
        weights = kind.weights_of(args)
        pin = pins.get(id(weights[0])) if weights else None
        if pin is None:
            return NotImplemented
        # A weight may serve several ops, or one with several biases: the first that it was packed for is served.
        layer: Any = pin.layer
        if layer is None and _may_call_onednn(args[0]):
            layer = _packed(cache, kind, weights, args)
        if type(layer) is not kind or len(weights) != len(layer.parameters):
            return NotImplemented
        return layer.run(op, args) if all(map(operator.is_, weights, layer.parameters)) else NotImplemented

    return call


def _may_call_onednn(x: Any) -> bool:
    """Whether an op of oneDNN's own may be called for ``x``, in place of torch's.

    Not where a mode, a tracer, forward-mode derivatives or a transform of `torch.func` would have to see torch's op, in
    a region of torch.autocast, or where the user turned oneDNN off.
    """
    return (
        type(x) is Tensor
        and x.is_cpu
        and (x.dtype is torch.bfloat16 or (x.dtype is torch.float32 and x.layout is torch.strided))
        and not x.is_nested
        and mkldnn_enabled()
        and not is_transformed(x)
        and not is_intercepted()
    )


def _packed(cache: CastCache, kind: Any, weights: tuple[Any, ...], args: tuple[Any, ...]) -> _Packed | None:
    """Cast and pack the weights of a layer, and keep that with the first one's pin; None where that cannot be."""
    pins: list[Any] = [cache.pins.get(id(weight)) for weight in weights]
    plain = all(
        type(weight) is Parameter and weight.dtype is torch.float32 and weight.layout is torch.strided
        for weight in weights
    )
    layer = _Packed()
    packs = torch.backends.mkldnn.is_available() and mkldnn.has_bf16()
    if packs and None not in pins and plain and kind.fits(weights, args):
        narrowed = [cast_for_any_mode(weight, Tensor.bfloat16) for weight in weights]
        if all(is_cacheable(one) and one.is_cpu and one.numel() > 0 for one in narrowed):
            with torch.inference_mode(False), torch.no_grad():
                layer = kind(weights, narrowed, args)
    with cache.lock:
        # Another thread may have ended the promise meanwhile.
        if any(cache.pins.get(id(weight)) is not pin for weight, pin in zip(weights, pins, strict=True)):
            return None
        pins[0].layer = layer
    return layer
