"""Loss scalers whose caller checks for overflow and updates the scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoamp.apex.fp16_utils import DynamicLossScaler, LossScaler


def test_a_static_scaler() -> None:
    scaler = LossScaler(8)
    weight = nn.Parameter(torch.ones(2))
    scaler.backward((weight * 2).sum())
    assert scaler.loss_scale == 8.0
    assert weight.grad.tolist() == [16.0, 16.0]  # type: ignore[union-attr]
    weight.grad.fill_(torch.inf)  # type: ignore[union-attr]
    assert scaler.has_overflow([weight]) is False
    scaler.update_scale(True)
    assert scaler.loss_scale == 8.0
    assert LossScaler().loss_scale == 1.0


def test_a_dynamic_scaler() -> None:
    scaler = DynamicLossScaler(init_scale=2**8, scale_factor=4.0, scale_window=2)
    scaler.update_scale(True)
    assert scaler.loss_scale == 64.0
    for _ in range(2):
        scaler.update_scale(False)
    assert scaler.loss_scale == 256.0
    assert DynamicLossScaler().loss_scale == 2.0**32


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1.0])
def test_has_overflow(value: float) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    parameters[1].grad = torch.tensor([0.0, 1.0])
    parameters[2].grad = torch.tensor([value, 1.0])
    assert DynamicLossScaler().has_overflow(parameters) is (value != 1.0)


def test_scale_gradient_is_a_backward_hook() -> None:
    layer = nn.Linear(2, 1, bias=False)
    scaler = LossScaler(4)
    layer.register_full_backward_hook(lambda module, inward, outward: scaler.scale_gradient(module, inward, outward))
    inputs = torch.ones(1, 2, requires_grad=True)
    output: Tensor = layer(inputs)
    output.sum().backward()
    torch.testing.assert_close(inputs.grad, layer.weight.detach() * 4)
