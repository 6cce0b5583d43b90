"""Scalars, statistics and what follows landed steps, over steps of which some are skips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.errors import UsageError


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


class Run:
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)


def train(handle: Any, overflowing: list[bool], optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    for overflows in overflowing:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 2)).float().mean() * 0.1 * (float("inf") if overflows else 1.0)
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def test_followers_step_on_landed_steps_alone() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale="dynamic")
    assert isinstance(handle, autoamp.Handle)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen: list[float] = []
    end = handle.follow(scheduler, lambda: seen.append(float(net.weight.detach()[0, 0])))
    writer, run = Writer(), Run()
    handle.log_to(writer, every=1)
    handle.log_to(run, every=2)
    train(handle, [False, True, False, True], optimizer, net)
    assert optimizer.param_groups[0]["lr"] == 0.25
    # The weights as each step left them.
    assert seen[-1] == float(net.weight.detach()[0, 0])
    assert len(seen) == 2
    assert handle.stats == {
        "loss_scale": 16384.0, "loss_scales": [16384.0], "steps": 4, "skipped": 2, "last_step_skipped": True,
        "overflows": {},
    }  # fmt: skip
    assert handle.postfix() == {"scale": "16384", "skipped": "2"}
    skips = [(value, step) for name, value, step in writer.scalars if name == "autoamp/skipped"]
    assert skips == [(0.0, 1), (1.0, 2), (1.0, 3), (2.0, 4)]
    assert run.logged == [
        {"autoamp/loss_scale": 32768.0, "autoamp/skipped": 1.0},
        {"autoamp/loss_scale": 16384.0, "autoamp/skipped": 2.0},
    ]
    end()
    train(handle, [False], optimizer, net)
    assert len(seen) == 2


def test_what_cannot_be_followed_or_written_to() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    assert isinstance(handle, autoamp.Handle)
    with pytest.raises(UsageError, match="cannot step a int"):
        handle.follow(3)
    with pytest.raises(UsageError, match="add_scalar"):
        handle.log_to(object())
    with pytest.raises(UsageError, match="every=0"):
        handle.log_to(Writer(), every=0)
