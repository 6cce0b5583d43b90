"""docs/howto/gan.md: several losses or optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from tests.behaviour.training import OVERFLOW, started


def two_networks(num_losses: int) -> tuple[Any, Any]:
    nets = [nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    return autoamp.initialize(  # type: ignore[return-value]
        nets, optimizers, opt_level="O1", num_losses=num_losses, device_type="cpu", dtype=torch.float16
    )


def backward(net: nn.Module, optimizer: Any, factor: float = 0.01, loss_id: int = 0) -> None:
    loss = net(torch.ones(1, 4)).float().sum() * factor
    with autoamp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
        scaled_loss.backward()


def test_an_overflow_of_one_loss_lowers_the_scale_of_that_loss_alone() -> None:
    nets, optimizers = two_networks(num_losses=3)
    backward(nets[0], optimizers[0], OVERFLOW, loss_id=1)
    optimizers[0].step()
    scales = [autoamp.state_dict()[f"loss_scaler{number}"]["loss_scale"] for number in range(3)]
    assert scales == [65536.0, 32768.0, 65536.0]


def test_optimizers_with_blocks_of_their_own_skip_steps_independently() -> None:
    nets, optimizers = two_networks(num_losses=2)
    before = [net.weight.detach().clone() for net in nets]
    for number, factor in enumerate((OVERFLOW, 0.01)):
        backward(nets[number], optimizers[number], factor, loss_id=number)
        optimizers[number].step()
    assert [torch.equal(net.weight, old) for net, old in zip(nets, before, strict=True)] == [True, False]


def test_optimizers_that_share_a_block_skip_together() -> None:
    nets, optimizers = two_networks(num_losses=1)
    before = [net.weight.detach().clone() for net in nets]
    loss = nets[0](torch.ones(1, 4)).float().sum() * OVERFLOW + nets[1](torch.ones(1, 4)).float().sum()
    with autoamp.scale_loss(loss, optimizers) as scaled_loss:
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [torch.equal(net.weight, old) for net, old in zip(nets, before, strict=True)] == [True, True]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("shared", [OVERFLOW, 0.01])
def test_a_shared_block_after_an_overflow_skips_the_optimizer_of_that_overflow_alone(
    shared: float, order: tuple[int, int]
) -> None:
    nets, optimizers = two_networks(num_losses=2)
    before = [net.weight.detach().clone() for net in nets]
    backward(nets[0], optimizers[0], OVERFLOW)
    loss = nets[0](torch.ones(1, 4)).float().sum() * 0.01 + nets[1](torch.ones(1, 4)).float().sum() * shared
    with autoamp.scale_loss(loss, optimizers, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    for number in order:
        optimizers[number].step()
    moved = [not torch.equal(net.weight, old) for net, old in zip(nets, before, strict=True)]
    assert moved == [False, shared != OVERFLOW]
    scales = [autoamp.state_dict()[f"loss_scaler{number}"]["loss_scale"] for number in (0, 1)]
    assert scales[0] == 32768.0
    assert shared == OVERFLOW or scales[1] == 65536.0


@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_in_a_delayed_part_lowers_the_scale_of_its_own_loss(bad: int) -> None:
    (net, _), (optimizer, _) = two_networks(num_losses=2)
    for number in (0, 1):
        loss = net(torch.ones(1, 4)).float().sum() * (OVERFLOW if number == bad else 0.01)
        with autoamp.scale_loss(loss, optimizer, loss_id=number, delay_unscale=number == 0) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    scales = [autoamp.state_dict()[f"loss_scaler{number}"]["loss_scale"] for number in (0, 1)]
    assert scales == [32768.0 if number == bad else 65536.0 for number in (0, 1)]


def test_a_wrapped_optimizer_has_a_scaler_for_each_loss_in_the_order_of_the_calls() -> None:
    handle, net = started(), nn.Linear(4, 1, bias=False)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), num_loss=2)
    for factors in ((1.0, OVERFLOW), (1.0, 1.0)):
        optimizer.zero_grad()
        for factor in factors:
            with optimizer.scale_loss(net(torch.ones(1, 4)).float().sum() * factor) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
    assert handle.state_dict() == {
        "loss_scaler0": {"loss_scale": 1024.0, "unskipped": 2},
        "loss_scaler1": {"loss_scale": 512.0, "unskipped": 1},
        "skipped_steps": 1,
    }
