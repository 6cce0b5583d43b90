"""docs/concepts.md: the loss scale, skipped steps, and why bf16 needs neither."""

from __future__ import annotations

import torch

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
