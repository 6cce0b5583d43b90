"""Recurrent layers of every kind, and a layout of their weights that is made by hand: cuDNN is not needed for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from autoamp.casting.flat_weights import FlatLayout, RecurrentLayer

SIZES = {"input_size": 5, "hidden_size": 6, "num_layers": 2}

LAYOUTS: list[RecurrentLayer] = []

MODELS: dict[str, Any] = {
    "LSTM": lambda: nn.LSTM(**SIZES),
    "LSTM in both directions": lambda: nn.LSTM(**SIZES, bidirectional=True, batch_first=True),
    "LSTM with a projection": lambda: nn.LSTM(**SIZES, proj_size=3),
    "LSTM without bias": lambda: nn.LSTM(**SIZES, bias=False),
    "GRU": lambda: nn.GRU(**SIZES),
    "RNN": lambda: nn.RNN(**SIZES),
    "RNN with relu": lambda: nn.RNN(**SIZES, nonlinearity="relu", bidirectional=True),
}


def laid_out(layer: RecurrentLayer, weights: Sequence[Tensor]) -> FlatLayout:
    """Biases first, and two elements between the weights."""
    LAYOUTS.append(layer)
    offsets, size = {}, 0
    for index in sorted(range(len(weights)), key=lambda index: weights[index].dim()):
        offsets[index] = size
        size += weights[index].numel() + 2
    return FlatLayout(size, tuple(offsets[index] for index in range(len(weights))))


def in_one_tensor(weights: Sequence[Tensor]) -> bool:
    return len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
