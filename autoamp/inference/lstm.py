"""LSTMs with pinned weights: cast and packed for oneDNN once, on a CPU with bf16 units.

`torch.lstm` runs oneDNN's layers there, one for each layer and direction, and has each reorder its weights at each
call, which at a width of 512 takes more time than all the rest. The same layers run here, with packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.inference.packing import Packed, may_call_onednn
from autoamp.torch_private import mkldnn

# oneDNN's number for an LSTM, in torch's own numbering of recurrent layers, and the weights and biases of a layer.
_MODE, _TENSORS = 2, 4


class PackedLSTM(Packed):
    """An LSTM of one or more layers, of one direction or two."""

    def __init__(self, parameters: tuple[Parameter, ...], narrowed: list[Tensor], args: tuple[Any, ...]) -> None:
        super().__init__(parameters, narrowed, args)
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
        plain = all(type(one) is Tensor and one.dim() == 3 and may_call_onednn(one) for one in tensors)
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

    def run(self, args: tuple[Any, ...], narrow: Callable[[Tensor], Tensor]) -> Any:
        """Return what `torch.lstm` returns; NotImplemented where shapes do not fit.

        The input is ``(length, batch, columns)``, or with ``batch_first`` ``(batch, length, columns)``; both states
        are ``(layers * directions, batch, width)``.
        """
        x, (h, c), count, bidirectional, batch_first = args[0], args[1], args[4], bool(args[7]), args[8]
        directions = 1 + bidirectional
        expected = len(self._layers), x.shape[0 if batch_first else 1], self._width
        if x.shape[2] != self._columns or x.numel() == 0 or h.shape != expected or c.shape != expected:
            return NotImplemented
        y = narrow(x.transpose(0, 1) if batch_first else x).contiguous()
        hs, cs = narrow(h).contiguous().unbind(), narrow(c).contiguous().unbind()
        last_h, last_c = [], []
        for number in range(count):
            outputs = []
            for direction in range(directions):
                index = number * directions + direction
                output, next_h, next_c, _ = mkldnn.lstm(
                    y, *self._layers[index], hs[index], cs[index], direction == 1, [], _MODE, self._width, count,
                    True, bidirectional, False, False,
                )  # fmt: skip
                outputs.append(output)
                last_h.append(next_h)
                last_c.append(next_c)
            y = torch.cat(outputs, -1) if bidirectional else outputs[0]
        return y.transpose(0, 1) if batch_first else y, torch.stack(last_h), torch.stack(last_c)
