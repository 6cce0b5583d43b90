"""Attention: torch's fast path for inference is shut where casts are on, so that its bits are those of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoamp


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [4, 129])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_model_computes_the_same_with_and_without_gradients(level: str, tokens: int, half: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model: Any = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = autoamp.initialize(model, optimizer, opt_level=level, dtype=half, device_type="cpu", verbosity=0)
    x = torch.randn(2, tokens, 16)
    expected = model(x).detach()
    for training in (True, False):
        model.train(training)
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(model(x), expected), (training, mode)
