"""docs/howto/checkpoints.md: save and resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoamp
from tests.behaviour.training import OVERFLOW, Training, started, step


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


GOOD: dict[str, Any] = {"loss_scale": 512.0, "unskipped": 3}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "the state is None; pass what state_dict"),
        ([1], "the state is a list; pass what state_dict"),
        ({}, r"with the keys loss_scaler0, skipped_steps; got 0 keys, the first \[\]"),
        ({"state": {}, "param_groups": []}, r"expected the result of state_dict.*got 2 keys, the first .'state', 'par"),
        ({"loss_scaler1": GOOD}, "key 'loss_scaler0' is missing; this run has the loss scalers loss_scaler0"),
        ({"loss_scaler0": GOOD, "other": 1}, "key 'other' is unknown"),
        ({"loss_scaler0": GOOD, 3: 4}, "key '3' is unknown"),
        ({"loss_scaler0": GOOD, "skipped_steps": -1}, "key 'skipped_steps': -1 is not a whole number of 0 or more"),
        ({"loss_scaler0": GOOD, "skipped_steps": True}, "key 'skipped_steps': True is not a whole number"),
        ({"loss_scaler0": 7}, "'loss_scaler0' is not a dict of 'loss_scale' and 'unskipped' alone, but an int"),
        ({"loss_scaler0": {"loss_scale": 2.0}}, "'loss_scaler0' is not a dict of 'loss_scale' and 'unskipped'"),
        ({"loss_scaler0": {**GOOD, "tracker": 1}}, "but .'loss_scale', 'tracker', 'uns"),
        ({"loss_scaler0": {**GOOD, "loss_scale": 0.0}}, "'loss_scaler0': 'loss_scale' is 0.0"),
        ({"loss_scaler0": {**GOOD, "loss_scale": 10**400}}, "'loss_scaler0': 'loss_scale' is 1000"),
        ({"loss_scaler0": {**GOOD, "unskipped": 1.5}}, "'loss_scaler0': 'unskipped' is 1.5"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded(state: Any, message: str) -> None:
    handle = started()
    before = handle.state_dict()
    with pytest.raises(autoamp.CheckpointError, match=message) as caught:
        handle.load_state_dict(state)
    assert str(caught.value).endswith("nothing was loaded")
    assert handle.state_dict() == before


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
            step(model, optimizer)
        return {name: value.clone() for name, value in model.state_dict().items()}

    through = train(*make(), 1, 2, 3, 4)
    model, optimizer = make()
    train(model, optimizer, 1, 2)
    saved = model.state_dict(), optimizer.state_dict(), autoamp.state_dict()
    model, optimizer = make()
    model.load_state_dict(saved[0]), optimizer.load_state_dict(saved[1]), autoamp.load_state_dict(saved[2])
    resumed = train(model, optimizer, 3, 4)
    assert all(torch.equal(through[name], resumed[name]) for name in through)
