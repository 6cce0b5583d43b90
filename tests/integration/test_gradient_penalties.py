"""Double backward passes around a scaled loss: gradient penalties."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import autoamp

LISTS = {"extends": [], "fp16": ["linear"], "fp32": ["mse_loss"]}
# How far gradients may be from those in fp32.
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2}


def network() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 1))


def initialized(level: Any, half: torch.dtype) -> tuple[nn.Sequential, torch.optim.SGD]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return autoamp.initialize(
        model, optimizer, opt_level=level, dtype=half, device_type="cpu", loss_scale=8.0, lists=LISTS, verbosity=0
    )


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


def gradients(params: Iterable[Any]) -> Tensor:
    return torch.cat([p.grad.detach().float().flatten() for p in params])


def close(got: Tensor, expected: Tensor, half: torch.dtype) -> None:
    assert (got - expected).norm() < TOLERANCE[half] * expected.norm()


def penalized(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """A loss with a gradient penalty, as in WGAN-GP, by plain autograd."""
    inputs = inputs.clone().requires_grad_()
    loss = mse_loss(model(inputs).float(), targets)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + (slope.float().norm(dim=1) - 0.1).pow(2).mean() * 50


@pytest.fixture
def expected() -> Tensor:
    """The gradients in fp32, of which the penalty makes a part."""
    model, (inputs, targets) = network(), data()
    mse_loss(model(inputs), targets).backward()
    without = gradients(model.parameters())
    model.zero_grad()
    penalized(model, inputs, targets).backward()
    found = gradients(model.parameters())
    assert (without - found).norm() > 0.1 * found.norm()
    return found


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gradient_penalty(level: str, half: torch.dtype, expected: Tensor) -> None:
    model, optimizer = initialized(level, half)
    for _ in range(2):
        optimizer.zero_grad()
        with autoamp.scale_loss(penalized(model, *data()), optimizer) as scaled:
            scaled.backward()
        close(gradients(autoamp.master_params(optimizer)), expected, half)
    before = [p.detach().clone() for p in autoamp.master_params(optimizer)]
    optimizer.step()
    assert not any(map(torch.equal, before, autoamp.master_params(optimizer)))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_double_backward_through_the_scaled_loss(level: str, half: torch.dtype, expected: Tensor) -> None:
    """The penalty is on gradients of the scaled loss, and divided by the scale within the block."""
    (inputs, targets), (model, optimizer) = data(), initialized(level, half)
    leaf = inputs.requires_grad_()
    loss = mse_loss(model(leaf).float(), targets)
    with autoamp.scale_loss(loss, optimizer) as scaled:
        (slope,) = torch.autograd.grad(scaled, leaf, create_graph=True)
        assert optimizer.param_groups[0]["params"][0].grad is None
        penalty = (slope.float().div(8.0).norm(dim=1) - 0.1).pow(2).mean() * 50
        (scaled + penalty * 8.0).backward()
    close(gradients(autoamp.master_params(optimizer)), expected, half)
