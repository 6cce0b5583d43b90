"""The weights of recurrent layers in one tensor, as cuDNN takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, RNNBase

from autoamp.torch_private import (
    flatten_recurrent_weights,
)

__all__ = ["RECURRENT_LAYERS", "FlatLayout", "RecurrentLayer", "flatten_weights", "layout_of"]

RECURRENT_LAYERS = {
    torch.gru: ("GRU", 3),
    torch.lstm: ("LSTM", 4),
    torch.rnn_relu: ("RNN_RELU", 1),
    torch.rnn_tanh: ("RNN_TANH", 1),
}


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """What tells the layout of a recurrent layer's weights: equal layers have the same.

    Attributes:
        kind: What torch calls it, ``"LSTM"`` say.
        gates: How many gates a weight is made of.
        shapes: The shapes of all weights.
        dtype: The dtype that they are cast to.
        count: How many layers lie upon each other.
        bidirectional: Whether each goes in both directions.
        batch_first: Whether batches come first.
    """

    kind: str
    gates: int
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    count: int
    bidirectional: bool
    batch_first: bool

    @property
    def each(self) -> int:
        """How many weights one layer has in one direction: two or three, and two biases."""
        return len(self.shapes) // (self.count * (2 if self.bidirectional else 1))


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where each weight begins in one flat tensor, and how many elements that has."""

    size: int
    offsets: tuple[int, ...]

    def views(self, like: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return views of a new flat tensor, in the shapes of these weights."""
        # Elements between weights, where a layout has such, are never read; a nan there would look bad all the same.
        make = torch.empty if self.size == sum(weight.numel() for weight in like) else torch.zeros
        flat = make(self.size, dtype=dtype, device=like[0].device)
        return [
            flat.narrow(0, offset, weight.numel()).view(weight.shape)
            for offset, weight in zip(self.offsets, like, strict=True)
        ]


@torch.no_grad()
def _move_to_one_tensor(layer: RecurrentLayer, weights: Sequence[Tensor]) -> Tensor:
    """Move weights into a flat tensor, in cuDNN's layout; returns that."""
    projection = layer.shapes[layer.each - 1][0] if layer.each in (3, 5) else 0
    assert flatten_recurrent_weights is not None
    with torch.cuda.device_of(weights[0]):
        return flatten_recurrent_weights(
            weights, layer.each, layer.shapes[0][1], torch.backends.cudnn.rnn.get_cudnn_mode(layer.kind),
            layer.shapes[0][0] // layer.gates, projection, layer.count, layer.batch_first, layer.bidirectional,
        )  # fmt: skip


def layout_of(layer: RecurrentLayer, weights: Sequence[Tensor]) -> FlatLayout:
    """Ask cuDNN for the layout of weights: torch lays out copies of them, and tells where it put each."""
    copies = [torch.empty(weight.shape, dtype=layer.dtype, device=weight.device) for weight in weights]
    size = _move_to_one_tensor(layer, copies).numel()
    return FlatLayout(size, tuple(int(copy.storage_offset()) for copy in copies))


def flatten_weights(
    module: RNNBase,
    move: Callable[[RecurrentLayer, Sequence[Tensor]], Any] = _move_to_one_tensor,
    takes: Callable[[Tensor], bool] = torch.cudnn_is_acceptable,
) -> None:
    """Move a recurrent layer's weights into one tensor, as cuDNN takes them; the parameters stay the same objects.

    `RNNBase.flatten_parameters` does so, but leaves bf16 alone, which cuDNN takes too and else copies at each call.
    Where cuDNN would not take the weights they stay.

    Args:
        module: The layer.
        move: Moves the weights of a layer.
        takes: Tells whether cuDNN takes a weight.
    """
    module.flatten_parameters()
    weights: list[Any] = module._flat_weights
    if (
        all(type(weight) is Parameter and weight.dtype is torch.bfloat16 and takes(weight) for weight in weights)
        and len({weight.device for weight in weights}) == 1
        # A weight that stands in two places cannot lie in both.
        and len({weight.data_ptr() for weight in weights}) == len(weights)
        and flatten_recurrent_weights is not None
    ):
        layer = RecurrentLayer(
            module.mode, len(weights[0]) // module.hidden_size, tuple(weight.shape for weight in weights),
            torch.bfloat16, module.num_layers, bool(module.bidirectional), module.batch_first,
        )  # fmt: skip
        move(layer, weights)
