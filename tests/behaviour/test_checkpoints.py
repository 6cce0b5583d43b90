"""docs/howto/checkpoints.md: save and resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoamp
from tests.behaviour.training import OVERFLOW, Training, started


def test_the_state_of_a_handle_has_scale_growth_and_skips() -> None:
    handle = started()
    assert handle.state_dict() == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 0}, "skipped_steps": 0}
    training = Training(handle)
    training.step(OVERFLOW)
    training.step()
    assert handle.state_dict() == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 1}, "skipped_steps": 1}


def test_a_new_handle_goes_on_at_the_saved_scale() -> None:
    handle = started()
    Training(handle).step(OVERFLOW)
    state = handle.state_dict()
    handle.deactivate()
    handle = started()
    handle.load_state_dict(state)
    assert (handle.loss_scale, handle.skipped_steps) == (512.0, 1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "key 'loss_scaler0' is missing"),
        ({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}, "other": 1}, "key 'other' is unknown"),
        ([1], "the state is a list; pass what state_dict"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded(state: Any, message: str) -> None:
    handle = started()
    with pytest.raises(autoamp.CheckpointError, match=message):
        handle.load_state_dict(state)
    assert handle.loss_scale == 1024.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(level: Any) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return autoamp.initialize(model, optimizer, opt_level=level, device_type="cpu", dtype=torch.float16)

    def train(model: Any, optimizer: Any, *seeds: int) -> dict[str, torch.Tensor]:
        for seed in seeds:
            torch.manual_seed(seed)
            optimizer.zero_grad()
            with autoamp.scale_loss(model(torch.rand(8, 4)).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    through = train(*make(), 1, 2, 3, 4)
    model, optimizer = make()
    train(model, optimizer, 1, 2)
    saved = model.state_dict(), optimizer.state_dict(), autoamp.state_dict()
    model, optimizer = make()
    model.load_state_dict(saved[0]), optimizer.load_state_dict(saved[1]), autoamp.load_state_dict(saved[2])
    resumed = train(model, optimizer, 3, 4)
    assert all(torch.equal(through[name], resumed[name]) for name in through)
