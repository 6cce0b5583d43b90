"""Scalars, statistics and what follows landed steps, over steps of which some are skips."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.core import UnreadFlags, make_scaler, runtime_of
from autoamp.errors import UsageError

INF = float("inf")


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def skipped(self) -> list[tuple[float, int]]:
        return [(value, step) for name, value, step in self.scalars if name == "autoamp/skipped"]


def init(**options: Any) -> Any:
    return autoamp.init(device_type="cpu", **{"dtype": torch.float16, "loss_scale": 64.0, **options})


@pytest.fixture
def net() -> nn.Module:
    return nn.Linear(2, 2)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1.0)


def loss_of(net: nn.Module, factor: float) -> torch.Tensor:
    loss: torch.Tensor = net(torch.ones(2, 2)).float().mean() * 0.1 * factor
    return loss


def train(handle: Any, factors: list[float], optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    for factor in factors:
        optimizer.zero_grad()
        with handle.scale_loss(loss_of(net, factor), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


class EmaOfModel(nn.Module):
    """As of timm: `update(model)`."""

    def update(self, model: nn.Module) -> None:
        pass


@pytest.mark.parametrize(
    ("follower", "message"),
    [
        (lambda net: 3, "cannot step an int"),
        (torch.optim.swa_utils.AveragedModel, "cannot step an AveragedModel.*update_parameters"),
        (lambda net: EmaOfModel(), "cannot step an EmaOfModel.*'model'.*update"),
        (
            lambda net: torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(net)),
            "cannot step a ReduceLROnPlateau.*'metrics'",
        ),
        (lambda net: lambda model: None, "missing a required argument"),
    ],
)
def test_what_cannot_be_called_without_arguments_is_refused(follower: Any, message: str, net: nn.Module) -> None:
    with pytest.raises(UsageError, match=message):
        init().follow(follower(net))


@pytest.mark.parametrize(("writer", "every", "message"), [(object(), 1, "add_scalar"), (Writer(), 0, "every=0")])
def test_what_cannot_be_logged_to_is_refused(writer: Any, every: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        init().log_to(writer, every=every)


def test_found_inf_by_loss_and_casts(net: nn.Module) -> None:
    handle, optimizer = init(trace_overflow=True), sgd(net)
    scalers = runtime_of(handle).optimizers
    scalers.loss_scalers.use([make_scaler(64.0, torch.float16), make_scaler("dynamic", torch.float16)], [])
    with handle.count():
        for loss_id, factor in ((0, 1.0), (1, INF), (1, INF)):
            optimizer.zero_grad()
            with handle.scale_loss(loss_of(net, factor), optimizer, loss_id) as scaled:
                scaled.backward()
            optimizer.step()
    found = handle.stats
    assert (found["found_inf"], found["loss_scales"]) == ([0, 0, 2], [64.0, 64.0, 16384.0])
    assert found["casts"] == {"float32->float16": 9}
    assert sum(found["overflows"].values()) == 2
    assert pickle.loads(pickle.dumps(scalers.scalers[2])).overflows == 2


def test_an_optimizer_within_fp16_optimizer(net: nn.Module) -> None:
    handle = init(loss_scale=None)
    optimizer = autoamp.FP16_Optimizer(sgd(net), static_loss_scale=8.0)
    seen: list[int] = []
    writer = Writer()
    handle.follow(lambda: seen.append(1))
    handle.log_to(writer, every=2)
    for factor in (1.0, INF, 1.0, INF):
        optimizer.zero_grad()
        optimizer.backward(loss_of(net, factor))
        optimizer.step()
    assert len(seen) == 2
    now = handle.stats
    assert (now["loss_scale"], now["loss_scales"], now["found_inf"]) == (8.0, [8.0], [2])
    assert (now["steps"], now["skipped"], now["last_step_skipped"]) == (4, 2, True)
    assert [step for _, step in writer.skipped()] == [2, 4]


def test_steps_of_losses_that_nobody_scales_are_followed_until_the_handle_ends(net: nn.Module) -> None:
    handle, optimizer = autoamp.init(device_type="cpu", dtype=torch.bfloat16), sgd(net)
    seen: list[int] = []
    handle.follow(lambda: seen.append(1))
    for _ in range(3):
        loss_of(net, 1.0).backward()
        optimizer.step()
    handle.deactivate()
    optimizer.step()
    assert len(seen) == 3


@pytest.mark.parametrize("follows", [False, True])
def test_a_fused_optimizer_is_followed_and_logged(follows: bool, net: nn.Module) -> None:
    """Flags stay on the device until a follower asks, or the log's turn has come."""
    handle = init()
    unread = runtime_of(handle).optimizers.scalers[0].unread = UnreadFlags(("cpu",))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    seen: list[int] = []
    if follows:
        handle.follow(lambda: seen.append(1))
    writer = Writer()
    handle.log_to(writer, every=4)
    train(handle, [1.0, INF, 1.0], optimizer, net)
    assert (len(unread), len(seen)) == ((0, 2) if follows else (3, 0))
    train(handle, [INF], optimizer, net)
    assert len(unread) == 0
    assert writer.skipped() == [(2.0, 4)]
    assert handle.stats["found_inf"] == [2]


def test_the_writer_of_tensorboard(tmp_path: Path, net: nn.Module) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    handle = init(loss_scale="dynamic")
    with SummaryWriter(str(tmp_path)) as writer:
        handle.log_to(writer, every=1)
        train(handle, [1.0, INF], sgd(net), net)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    scalars = {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}
    assert scalars == {
        "autoamp/loss_scale": [(1, 65536.0), (2, 32768.0)], "autoamp/skipped": [(1, 0.0), (2, 1.0)],
    }  # fmt: skip


def test_a_run_that_has_log_gets_the_numbers_of_a_step_at_once(net: nn.Module) -> None:
    """As a run of Weights & Biases."""

    class Run:
        def __init__(self) -> None:
            self.logged: list[dict[str, float]] = []

        def log(self, values: dict[str, float]) -> None:
            self.logged.append(values)

    handle, optimizer, run = init(), sgd(net), Run()
    handle.log_to(run, every=2)
    train(handle, [1.0, INF, 1.0, INF], optimizer, net)
    assert [values["autoamp/skipped"] for values in run.logged] == [1, 2]
