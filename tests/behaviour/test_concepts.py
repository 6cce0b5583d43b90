"""docs/concepts.md: the loss scale, skipped steps, and why bf16 needs neither."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.behaviour.training import OVERFLOW, Training, started


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    training = Training(started())
    training.step(OVERFLOW)
    assert (training.weight, training.handle.skipped_steps, training.handle.loss_scale) == (1.0, 1, 512.0)
    training.step()
    assert (training.weight, training.handle.skipped_steps, training.handle.loss_scale) == (0.5, 1, 512.0)


def test_a_skipped_step_changes_neither_weights_nor_state_of_the_optimizer() -> None:
    training = Training(started())
    training.optimizer = torch.optim.Adam(training.model.parameters())  # type: ignore[assignment]
    training.step()
    weight, state = training.weight, {name: float(one.sum()) for name, one in _state(training).items()}
    training.step(OVERFLOW)
    assert training.weight == weight
    assert {name: float(one.sum()) for name, one in _state(training).items()} == state


def _state(training: Training) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = training.optimizer.state[training.model.weight]
    return state


def test_the_scale_doubles_after_2000_steps_without_an_overflow() -> None:
    training = Training(started())
    training.handle.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1999}})
    training.step()
    assert training.handle.loss_scale == 16.0


def test_bf16_needs_no_loss_scale() -> None:
    training = Training(autoamp.init(device_type="cpu", dtype=torch.bfloat16))
    with training.handle.scale_loss(training.loss(), training.optimizer) as scaled_loss:
        assert scaled_loss.item() == training.loss().item()
        scaled_loss.backward()
    training.optimizer.step()
    assert (training.handle.loss_scale, training.handle.skipped_steps, training.weight) == (1.0, 0, 0.5)


class Masked(nn.Module):
    """A layer with a mask that holds inf, a running statistic and a codebook of its own."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(4, 4), writes
        self.register_buffer("mask", torch.full((4,), -torch.inf))
        for name in ("running_max", "codebook"):
            self.register_buffer(name, torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        if self.writes:
            getattr(self, self.writes).add_(outputs.detach().mean(0) * 0)
        return outputs


NORMS: dict[str, tuple[Any, str]] = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "Sequential.body.1.running_mean"),
    "a statistic of the program's own": (lambda: Masked("running_max"), "Sequential.body.running_max"),
    "another buffer with nan": (lambda: Masked("codebook"), "Sequential.body.codebook"),
    "a mask": (lambda: Masked(""), ""),
}


@pytest.mark.parametrize("level", ["O1", "O2", "auto_scale"])
@pytest.mark.parametrize("name", NORMS)
def test_buffers_in_which_a_skipped_step_left_inf_or_nan_are_told_once_by_their_paths(
    name: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, path = NORMS[name]
    model: Any = nn.Sequential()
    model.add_module("body", make())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16, "loss_scale": 128.0}
    if level == "auto_scale":
        autoamp.init(**settings).auto_scale()
    else:
        model, optimizer = autoamp.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)

    def step(inputs: Tensor, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        loss = model(inputs).float().square().mean() * factor
        if level == "auto_scale":
            loss.backward()
        else:
            with autoamp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "in buffers" in record.getMessage()]

    caplog.set_level(logging.WARNING)
    step(torch.rand(8, 4))
    # Gradients that overflow leave no inf in buffers.
    step(torch.rand(8, 4), OVERFLOW)
    assert autoamp.current_handle().skipped_steps == 1  # type: ignore[union-attr]
    assert told() == []
    for _ in range(2):
        step(torch.rand(8, 4) * 1e6)
    assert len(told()) == bool(path)
    assert all(f"{path}" in text and "reset_running_stats()" in text for text in told())
    assert all("mask" not in text for text in told())
