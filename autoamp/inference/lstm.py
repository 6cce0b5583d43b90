"""LSTMs whose weights somebody promised not to write to: cast and packed for oneDNN once, on a CPU with bf16 units.

`torch.lstm` runs oneDNN's layers there, one for each layer and direction, and has each reorder its weights at each
call, which at a width of 512 takes more time than all the rest. The same layers run here, with packed weights.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.casting import CastCache, Casts
from autoamp.inference.layers import keep_with_pins, lasting_casts
from autoamp.inference.packing import can_pack, may_call_onednn
from autoamp.torch_private import in_function_mode, is_any_autocast_enabled, mkldnn, tracing_state

__all__ = ["LSTM", "PinnedLSTM", "build_lstm"]

LSTM = torch.lstm
"""The op, which `torch._VF` has too."""

# oneDNN's number for an LSTM, in torch's own numbering of recurrent layers, and the weights and biases of a layer.
_MODE, _TENSORS = 2, 4


class PinnedLSTM:
    """The packed weights of all layers of an LSTM, for the pin of the first weight.

    Attributes:
        parameters: What was cast and packed, to tell these layers from others that share a weight with them.
        columns: The size of a vector that goes in.
        width: The size of the hidden state.
        count: How many layers there are, of one direction or two each.
    """

    __slots__ = ("_layers", "columns", "count", "parameters", "width")

    op = LSTM

    def __init__(self, weights: list[Parameter], narrowed: list[Tensor], x: Tensor, directions: int) -> None:
        self.parameters = tuple(weights)
        self.columns, self.width = weights[0].shape[1], weights[1].shape[1]
        self.count = len(weights) // _TENSORS // directions
        self._layers: list[tuple[Tensor, ...]] = []
        for start in range(0, len(narrowed), _TENSORS):
            of_input, of_hidden, *biases = narrowed[start : start + _TENSORS]
            reverse = start // _TENSORS % directions == 1
            # Packed for the lengths that it is first used with.
            size = [x.shape[0], x.shape[1], of_input.shape[1]]
            self._layers.append(
                (*mkldnn.reorder_lstm(of_input, of_hidden, self.width, reverse, True, False, size), *biases)
            )

    def run(
        self, x: Tensor, h: Tensor, c: Tensor, *, bidirectional: bool, batch_first: bool
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return what `torch.lstm` returns, for tensors of the weights' dtype; None where shapes do not fit.

        Args:
            x: The input: ``(length, batch, columns)``, or with ``batch_first`` ``(batch, length, columns)``.
            h: The hidden state, ``(layers * directions, batch, width)``.
            c: The cell state, of the same shape.
            bidirectional: Whether each layer goes in both directions.
            batch_first: Whether batches come first.
        """
        directions = 2 if bidirectional else 1
        expected = self.count * directions, x.shape[0 if batch_first else 1], self.width
        if x.shape[2] != self.columns or x.numel() == 0 or h.shape != expected or c.shape != expected:
            return None
        y = (x.transpose(0, 1) if batch_first else x).contiguous()
        hs, cs = h.contiguous().unbind(), c.contiguous().unbind()
        last_h, last_c = [], []
        for number in range(self.count):
            outputs = []
            for direction in range(directions):
                index = number * directions + direction
                output, next_h, next_c, _ = mkldnn.lstm(
                    y, *self._layers[index], hs[index], cs[index], direction == 1, [], _MODE, self.width, self.count,
                    True, bidirectional, False, False,
                )  # fmt: skip
                outputs.append(output)
                last_h.append(next_h)
                last_c.append(next_c)
            y = torch.cat(outputs, -1) if bidirectional else outputs[0]
        return y.transpose(0, 1) if batch_first else y, torch.stack(last_h), torch.stack(last_c)


def build_lstm(original: Any, general: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """Build the replacement of `torch.lstm` under the policy fp16, on a CPU.

    Args:
        original: `torch.lstm`.
        general: The replacement that takes whatever is not promised to stay, or cannot be packed.
        casts: The state that the replacement reads.
    """
    local, deviations, cache, pins = casts.local, casts.deviations, casts.cache, casts.cache.pins
    target, full, strided, narrow = casts.dtype, torch.float32, torch.strided, casts.narrow
    compiling, any_autocast, records = (
        torch.compiler.is_dynamo_compiling, is_any_autocast_enabled, torch.is_grad_enabled,
    )  # fmt: skip
    trace = tracing_state

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if (
            compiling()
            or not pins
            or len(args) != 9
            or kwargs
            or type(args[2]) is not list
            or not args[2]
            or id(args[2][0]) not in pins
            or (deviations and not local.on)
            or records()
            or any_autocast()
            or in_function_mode()
            or trace() is not None
        ):
            return general(*args, **kwargs)
        x, hidden, weights, has_biases, layers, dropout, training, bidirectional, batch_first = args
        directions = 2 if bidirectional else 1
        # The op's other form takes a packed sequence: its sizes stand in the place of the hidden state.
        if (
            type(hidden) is not tuple
            or len(hidden) != 2
            or not has_biases
            or (dropout and training)
            or len(weights) != _TENSORS * layers * directions
        ):
            return general(*args)
        narrowed: list[Any] = []
        for tensor in (x, *hidden):
            if type(tensor) is not Tensor or tensor.dim() != 3 or not may_call_onednn(tensor):
                return general(*args)
            if tensor.dtype is not target:
                if tensor.dtype is not full or tensor.layout is not strided:
                    return general(*args)
                tensor = narrow(tensor)
            narrowed.append(tensor)
        pinned = _pinned(cache, weights, x, directions, narrow)
        result = (
            None
            if pinned is None
            else pinned.run(*narrowed, bidirectional=directions == 2, batch_first=bool(batch_first))
        )
        return general(*args) if result is None else result

    return replacement


def _pinned(
    cache: CastCache, weights: list[Any], x: Tensor, directions: int, narrow: Callable[[Tensor], Tensor]
) -> PinnedLSTM | None:
    """Return the packed weights, made at their first use; None where one is not promised to stay, or not packed."""
    pin = cache.pins.get(id(weights[0]))
    if pin is None:
        return None
    pinned = pin.layer
    if pinned is not None:
        if type(pinned) is not PinnedLSTM or len(weights) != len(pinned.parameters):
            return None
        return pinned if all(map(operator.is_, weights, pinned.parameters)) else None
    pins = [cache.pins.get(id(weight)) for weight in weights]
    narrowed = lasting_casts(weights, narrow) if None not in pins and _are_weights(weights, directions) else None
    if mkldnn.lstm is None or narrowed is None or not all(map(can_pack, narrowed)):
        return None
    with torch.inference_mode(False), torch.no_grad():
        pinned = PinnedLSTM(weights, narrowed, x, directions)
    return pinned if keep_with_pins(cache, pinned, pins) else None


def _are_weights(weights: list[Any], directions: int) -> bool:
    """Tell whether these are the fp32 weights and biases of layers that follow each other."""
    if not all(type(weight) is Parameter and weight.dtype is torch.float32 for weight in weights):
        return False
    if weights[0].dim() != 2:
        return False
    (rows, columns), width = weights[0].shape, weights[0].shape[0] // 4
    for start in range(0, len(weights), _TENSORS):
        shapes = [tuple(weight.shape) for weight in weights[start : start + _TENSORS]]
        if start >= _TENSORS * directions:
            columns = width * directions
        if shapes != [(rows, columns), (rows, width), (rows,), (rows,)]:
            return False
    return True
