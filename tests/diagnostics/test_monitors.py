"""Scalars, statistics and what follows landed steps, over steps of which some are skips."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.errors import UsageError
from autoamp.runtime import runtime_of
from autoamp.scaling import UnreadFlags, make_scaler


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
        "found_inf": [2], "nonfinite": 0, "casts": {}, "overflows": {},
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


class Ema:
    """As of torch_ema: `update()` moves averages of the weights."""

    def __init__(self, net: nn.Module) -> None:
        self.params = list(net.parameters())
        self.averages = [param.detach().clone() for param in self.params]
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        torch._foreach_lerp_(self.averages, [param.detach() for param in self.params], 0.5)


class EmaOfModel(nn.Module):
    """As of timm: `update(model)`."""

    def update(self, model: nn.Module) -> None:
        pass


def test_averages_of_weights_follow_landed_steps() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0)
    assert isinstance(handle, autoamp.Handle)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    ema, averaged = Ema(net), torch.optim.swa_utils.AveragedModel(net)
    expected = net.weight.detach().clone()
    handle.follow(ema, lambda: averaged.update_parameters(net))
    for overflows in (False, True, False):
        train(handle, [overflows], optimizer, net)
        expected.lerp_(net.weight.detach(), 0.0 if overflows else 0.5)
    assert (ema.updates, int(averaged.n_averaged)) == (2, 2)
    assert torch.equal(ema.averages[0], expected)


def test_what_needs_arguments_is_refused_at_once() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    assert isinstance(handle, autoamp.Handle)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for follower, named in (
        (torch.optim.swa_utils.AveragedModel(net), "cannot step a AveragedModel.*update_parameters"),
        (EmaOfModel(), r"EmaOfModel.update\(\) with no arguments .*'model'"),
        (torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), r"ReduceLROnPlateau.step\(\) with no arguments"),
        (lambda model: None, "missing a required argument"),
    ):
        with pytest.raises(UsageError, match=named):
            handle.follow(follower)


def test_found_inf_by_loss_and_casts() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=True)
    assert isinstance(handle, autoamp.Handle)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    runtime_of(handle).optimizers.use_scalers(
        [make_scaler(64.0, torch.float16), make_scaler("dynamic", torch.float16)], []
    )
    with handle.count():
        for loss_id, factor in ((0, 1.0), (1, float("inf")), (1, float("inf"))):
            optimizer.zero_grad()
            with handle.scale_loss(net(torch.ones(2, 2)).float().mean() * factor, optimizer, loss_id) as scaled:
                scaled.backward()
            optimizer.step()
    found = handle.stats
    assert (found["found_inf"], found["loss_scales"]) == ([0, 0, 2], [64.0, 64.0, 16384.0])
    assert found["casts"] == {"float32->float16": 9}
    assert sum(found["overflows"].values()) == 2
    assert pickle.loads(pickle.dumps(runtime_of(handle).optimizers.scalers[2])).overflows == 2


def test_an_optimizer_within_fp16_optimizer() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    assert isinstance(handle, autoamp.Handle)
    net = nn.Linear(2, 2)
    optimizer = autoamp.FP16_Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), static_loss_scale=8.0)
    seen: list[int] = []
    writer = Writer()
    handle.follow(lambda: seen.append(1))
    handle.log_to(writer, every=2)
    for factor in (1.0, float("inf"), 1.0, float("inf")):
        optimizer.zero_grad()
        optimizer.backward(net(torch.ones(2, 2)).float().mean() * factor)
        optimizer.step()
    assert len(seen) == 2
    now = handle.stats
    assert (now["loss_scale"], now["loss_scales"], now["found_inf"]) == (8.0, [8.0], [2])
    assert (now["steps"], now["skipped"], now["last_step_skipped"]) == (4, 2, True)
    assert [step for name, _, step in writer.scalars if name == "autoamp/skipped"] == [2, 4]


@pytest.mark.parametrize("enabled", [False, True])
def test_losses_that_nobody_scales(enabled: bool) -> None:
    """In bf16, as with enabled=False, programs need no scale_loss(): all steps land."""
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16, enabled=enabled)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[int] = []
    end = handle.follow(lambda: seen.append(1))
    for _ in range(3):
        net(torch.ones(2, 2)).float().mean().backward()
        optimizer.step()
    assert len(seen) == 3
    assert handle.stats.keys() == autoamp.init(enabled=False).stats.keys()
    end()
    end()
    optimizer.step()
    assert len(seen) == 3
    handle.follow(lambda: seen.append(1))
    handle.deactivate()
    optimizer.step()
    assert len(seen) == 3


@pytest.mark.parametrize("follows", [False, True])
def test_a_fused_optimizer_is_followed_and_logged(follows: bool) -> None:
    """Flags stay on the device until a follower asks, or the log's turn has come."""
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0)
    assert isinstance(handle, autoamp.Handle)
    unread = runtime_of(handle).optimizers.scalers[0].unread = UnreadFlags(("cpu",))
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    seen: list[int] = []
    if follows:
        handle.follow(lambda: seen.append(1))
    writer = Writer()
    handle.log_to(writer, every=4)
    train(handle, [False, True, False], optimizer, net)
    assert (len(unread), len(seen)) == ((0, 2) if follows else (3, 0))
    train(handle, [True], optimizer, net)
    assert len(unread) == 0
    assert ("autoamp/skipped", 2.0, 4) in writer.scalars
    assert handle.stats["found_inf"] == [2]


def test_the_writer_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale="dynamic")
    assert isinstance(handle, autoamp.Handle)
    net = nn.Linear(2, 2)
    with SummaryWriter(str(tmp_path)) as writer:
        handle.log_to(writer, every=1)
        train(handle, [False, True], torch.optim.SGD(net.parameters(), lr=0.1), net)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    scalars = {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}
    assert scalars == {
        "autoamp/loss_scale": [(1, 65536.0), (2, 32768.0)], "autoamp/skipped": [(1, 0.0), (2, 1.0)],
    }  # fmt: skip
