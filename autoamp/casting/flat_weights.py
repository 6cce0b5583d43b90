"""The weights of recurrent layers in one flat tensor, in the layout that cuDNN takes without a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, RNNBase

from autoamp.torch_private import flatten_recurrent_weights

__all__ = ["RECURRENT_LAYERS", "FlatLayout", "RecurrentLayer", "cudnn_layout_of", "flatten_weights"]

RECURRENT_LAYERS = {
    torch.gru: ("GRU", 3),
    torch.lstm: ("LSTM", 4),
    torch.rnn_relu: ("RNN_RELU", 1),
    torch.rnn_tanh: ("RNN_TANH", 1),
}
"""By op, which `torch._VF` has too: torch's name of the kind of layer, and how many gates a weight is made of."""


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """All that the layout of a recurrent layer's weights depends on: of equal ones it is the same.

    Attributes:
        kind: Torch's name of the kind of layer, such as ``"LSTM"``.
        gates: How many gates a weight is made of.
        shapes: The shapes of all weights, in the order of the op's argument.
        dtype: The dtype that they are cast to.
        count: The ``num_layers`` of the module.
        bidirectional: Whether each layer goes in both directions.
        batch_first: Whether the batch is the first dimension of the input.
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
    """Where each weight begins in a flat tensor.

    Attributes:
        size: How many elements the flat tensor has.
        offsets: The first element of each weight.
    """

    size: int
    offsets: tuple[int, ...]

    def views(self, like: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return views of a new flat tensor of ``dtype``, in the shapes of these weights and on their device."""
        # Elements between weights are never read, but a nan there would show in a check of the whole tensor.
        make = torch.empty if self.size == sum(weight.numel() for weight in like) else torch.zeros
        flat = make(self.size, dtype=dtype, device=like[0].device)
        return [
            flat.narrow(0, offset, weight.numel()).view(weight.shape)
            for offset, weight in zip(self.offsets, like, strict=True)
        ]


@torch.no_grad()
def _move_to_one_tensor(layer: RecurrentLayer, weights: Sequence[Tensor]) -> Tensor:
    """Move weights into a flat tensor, in cuDNN's layout, and return that tensor."""
    projection = layer.shapes[layer.each - 1][0] if layer.each in (3, 5) else 0
    assert flatten_recurrent_weights is not None
    with torch.cuda.device_of(weights[0]):
        return flatten_recurrent_weights(
            weights, layer.each, layer.shapes[0][1], torch.backends.cudnn.rnn.get_cudnn_mode(layer.kind),
            layer.shapes[0][0] // layer.gates, projection, layer.count, layer.batch_first, layer.bidirectional,
        )  # fmt: skip


def cudnn_layout_of(layer: RecurrentLayer, weights: Sequence[Tensor]) -> FlatLayout:
    """Return cuDNN's layout of weights, found by laying out empty tensors of their shapes."""
    copies = [torch.empty(weight.shape, dtype=layer.dtype, device=weight.device) for weight in weights]
    size = _move_to_one_tensor(layer, copies).numel()
    return FlatLayout(size, tuple(int(copy.storage_offset()) for copy in copies))


def flatten_weights(
    module: RNNBase,
    move: Callable[[RecurrentLayer, Sequence[Tensor]], Any] = _move_to_one_tensor,
    takes: Callable[[Tensor], bool] = torch.cudnn_is_acceptable,
) -> None:
    """Move a recurrent layer's weights into one flat tensor, as cuDNN takes them. The parameters stay the same objects.

    `RNNBase.flatten_parameters` does so for other dtypes. It leaves bf16 alone, which cuDNN takes too, and would copy
    at each call. Where cuDNN would not take the weights they stay as they are.

    Args:
        module: The layer.
        move: Moves the weights of a layer into a flat tensor.
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
