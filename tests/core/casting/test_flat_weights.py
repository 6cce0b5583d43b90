"""Weights of recurrent layers move to one tensor, in a layout that is made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoamp.core import flatten_weights
from tests.core.casting.recurrent import LAYOUTS, MODELS, in_one_tensor, pretend_cudnn


@pytest.mark.parametrize("name", MODELS)
def test_weights_in_bf16_move_to_one_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cudnn(monkeypatch)
    model: nn.RNNBase = MODELS[name]().bfloat16()
    before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]

    flatten_weights(model)
    assert [(model.mode, model.num_layers, model.bidirectional, model.batch_first)] == LAYOUTS
    assert in_one_tensor(list(model.parameters()))
    for parameter, (same, values) in zip(model.parameters(), before, strict=True):
        assert parameter is same
        assert torch.equal(parameter, values)


def test_weights_that_cannot_move_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cudnn(monkeypatch)
    shared = MODELS["LSTM"]().bfloat16()
    shared.bias_hh_l0 = shared.bias_ih_l0
    mixed = MODELS["LSTM"]().bfloat16()
    mixed.bias_hh_l0.data = mixed.bias_hh_l0.data.float()
    # Torch's own method sees to the others.
    for model in (shared, mixed, MODELS["LSTM"](), MODELS["LSTM"]().half()):
        flatten_weights(model)
    pretend_cudnn(monkeypatch, takes=False)
    flatten_weights(MODELS["LSTM"]().bfloat16())
    assert not LAYOUTS
