"""Recurrent layers of every kind, and a layout of their weights that is made by hand: cuDNN is not needed for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoamp.core import flat_layout

SIZES = {"input_size": 5, "hidden_size": 6, "num_layers": 2}

LAYOUTS: list[tuple[Any, ...]] = []

MODELS: dict[str, Any] = {
    "LSTM": lambda: nn.LSTM(**SIZES),
    "LSTM in both directions": lambda: nn.LSTM(**SIZES, bidirectional=True, batch_first=True),
    "LSTM with a projection": lambda: nn.LSTM(**SIZES, proj_size=3),
    "LSTM without bias": lambda: nn.LSTM(5, 6, 3, bias=False),
    "LSTM with a projection, without bias": lambda: nn.LSTM(5, 6, 3, bias=False, proj_size=3),
    "GRU": lambda: nn.GRU(**SIZES),
    "RNN": lambda: nn.RNN(**SIZES),
    "RNN with relu": lambda: nn.RNN(**SIZES, nonlinearity="relu", bidirectional=True),
}


def lay_out(weights: Sequence[Tensor], *layer: Any) -> None:
    """Biases first, and two elements between the weights."""
    LAYOUTS.append(layer)
    flat, start = torch.zeros(sum(weight.numel() + 2 for weight in weights), dtype=weights[0].dtype), 0
    for weight in sorted(weights, key=Tensor.dim):
        weight.data = flat[start : start + weight.numel()].view(weight.shape).copy_(weight.detach())
        start += weight.numel() + 2


def pretend_cudnn(monkeypatch: pytest.MonkeyPatch, takes: bool = True) -> None:
    """Let cuDNN take all tensors, or none, and have the layout of `lay_out`."""
    LAYOUTS.clear()
    flat_layout.cache_clear()
    monkeypatch.setattr(torch, "cudnn_is_acceptable", lambda _: takes)
    monkeypatch.setattr("autoamp.core.special_calls.lay_out", lay_out)


def in_one_tensor(weights: Sequence[Tensor]) -> bool:
    return len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
