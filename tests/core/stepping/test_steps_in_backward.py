"""Optimizers that hooks of parameters call within the backward pass: what a block says of it, and what works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp

HALF, BF16 = torch.float16, torch.bfloat16


def stepping_in_hooks(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers, one for each parameter."""
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def moved(model: nn.Module, backward: Any) -> list[Tensor]:
    before = [param.detach().clone() for param in model.parameters()]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        backward(model(x).float().mean())
    return [param.detach() - old for param, old in zip(model.parameters(), before, strict=True)]


def in_block(handle: Any, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    with handle.scale_loss(model(torch.ones(1, 8)).float().mean(), optimizers) as scaled:
        scaled.backward()


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("level", [None, "O1"])
def test_a_block_refuses_them_and_names_what_trains(level: str | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model.load_state_dict(plain.state_dict())
    stepping_in_hooks(plain)
    expected = moved(plain, Tensor.backward)
    optimizers = stepping_in_hooks(model)
    if level is None:
        autoamp.init(device_type="cpu", dtype=dtype)
    else:
        autoamp.initialize(model, optimizers, opt_level=level, dtype=dtype, device_type="cpu", verbosity=0)
    handle: Any = autoamp.current_handle()
    try:
        with pytest.raises(autoamp.UsageError, match=r"call handle\.auto_scale\(\) once and leave scale_loss out$"):
            in_block(handle, model, optimizers)
        assert torch.equal(model[1].weight, plain[1].weight - expected[2])
        for optimizer in optimizers:
            optimizer.zero_grad()
        # As the message says.
        handle.auto_scale()
        found = moved(model, Tensor.backward)
    finally:
        handle.deactivate()
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-2)


def test_at_o2_the_block_names_nothing_that_is_refused_there() -> None:
    model = nn.Linear(8, 2)
    optimizers = stepping_in_hooks(model)
    autoamp.initialize(model, optimizers, opt_level="O2", dtype=HALF, device_type="cpu", verbosity=0)
    handle: Any = autoamp.current_handle()
    try:
        with pytest.raises(autoamp.UsageError, match=r"move optimizer\.step\(\) after the with block$"):
            in_block(handle, model, optimizers)
    finally:
        handle.deactivate()
