"""The scaler of each loss, scalers of single optimizers, and the checkpoint of all."""

from __future__ import annotations

from typing import Any

import pytest

from autoamp.errors import CheckpointError, UsageError
from autoamp.scaling import DynamicLossScaler, LossScaler, StaticLossScaler
from autoamp.stepping import Skips
from autoamp.stepping.loss_scalers import LossScalers


class Optimizer:
    """As much of one as scalers are looked up by."""


def skips() -> Skips:
    return Skips("SGD", lambda: None)


def two() -> LossScalers:
    return LossScalers([DynamicLossScaler(1024.0), StaticLossScaler(8.0)])


# -- which scaler --


def test_a_loss_has_the_scaler_of_its_number() -> None:
    scalers = two()
    assert [scalers.choose(0), scalers.choose(1, Optimizer())] == scalers.all
    for wrong in (-1, 2):
        with pytest.raises(UsageError, match=f"loss_id={wrong} has no scaler; choose 0 or 1"):
            scalers.choose(wrong)


def test_an_optimizer_has_the_scalers_of_the_call_that_named_it() -> None:
    first, second, other = Optimizer(), Optimizer(), Optimizer()
    scalers, unchecked, checked = two(), StaticLossScaler(1.0), StaticLossScaler(4.0)
    scalers.use([unchecked], [first])
    scalers.use([checked], [second])
    assert (scalers.choose(0, first), scalers.choose(0, second)) == (unchecked, checked)
    assert scalers.choose(0, other) is checked
    # Of both at once the one whose gradients are checked.
    assert scalers.choose(0, [first, second]) is checked
    assert scalers.all[2:] == [unchecked, checked]
    scalers.forget_but([checked])
    assert scalers.all == [checked]


def test_each_loss_has_a_scaler_of_its_own() -> None:
    first, second, scalers = Optimizer(), Optimizer(), two()
    shared: LossScaler = DynamicLossScaler(8.0)
    scalers.give_own(first, [shared, shared], skips())
    scalers.give_own(second, [shared], skips())
    assert scalers.all[0] is shared
    scalers.all[1].update(True)
    scalers.all[2].update(False)
    assert [(scaler.loss_scale, scaler.unskipped) for scaler in scalers.all] == [(8.0, 0), (4.0, 0), (8.0, 1)]


# -- checkpoints --

GOOD: dict[str, Any] = {
    "loss_scaler0": {"loss_scale": 512.0, "unskipped": 3},
    "loss_scaler1": {"loss_scale": 2.0, "unskipped": 0},
    "skipped_steps": 5,
}


def test_a_state_goes_round() -> None:
    scalers = two()
    before = scalers.state_dict(0)
    assert before == {
        "loss_scaler0": {"loss_scale": 1024.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 8.0, "unskipped": 0},
        "skipped_steps": 0,
    }
    assert scalers.load_state_dict(GOOD) == 5
    assert scalers.state_dict(5) == GOOD
    assert scalers.load_state_dict(before) == 0
    assert scalers.state_dict(0) == before


def test_a_state_has_the_scalers_of_the_last_call_and_those_used_since_then() -> None:
    first, second, scalers = Optimizer(), Optimizer(), LossScalers([])
    earlier, later = DynamicLossScaler(64.0), StaticLossScaler(8.0)
    scalers.use([earlier], [first])
    scalers.choose(0, first)
    scalers.use([later], [second])
    # Nobody can refer weakly to a number, which no call has named.
    assert scalers.choose(0, 3) is scalers.choose(0) is later
    assert scalers.state_dict(1) == {"loss_scaler0": later.state_dict(), "skipped_steps": 1}
    scalers.choose(0, first)
    state = scalers.state_dict(2)
    assert state == {"loss_scaler0": earlier.state_dict(), "loss_scaler1": later.state_dict(), "skipped_steps": 2}
    # As many entries as the last call has scalers are those of the last call.
    assert scalers.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}}) == 0
    assert (earlier.loss_scale, later.loss_scale) == (64.0, 2.0)
    scalers.load_state_dict(state)
    assert (earlier.loss_scale, later.loss_scale, scalers.has_dynamic) == (64.0, 8.0, True)
    scalers.forget_but([later])
    assert (scalers.all, scalers.has_dynamic) == ([later], False)


def edited(**changes: Any) -> dict[str, Any]:
    """A good state with some keys changed; None takes a key away."""
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, r"the state is None; pass what state_dict\(\) returned"),
        ([1], r"the state is a list; pass what state_dict\(\) returned"),
        ({}, "key 'loss_scaler0' is missing; this run has the loss scalers loss_scaler0, loss_scaler1"),
        (edited(loss_scaler1=None), "key 'loss_scaler1' is missing"),
        (
            edited(loss_scaler2={}),
            "key 'loss_scaler2' is unknown; this run has the loss scalers loss_scaler0, loss_scaler1",
        ),
        ({**GOOD, 3: 4}, "key '3' is unknown"),
        (edited(skipped_steps=-1), "key 'skipped_steps': -1 is not a whole number of 0 or more"),
        (edited(skipped_steps=True), "key 'skipped_steps': True is not a whole number"),
        (edited(skipped_steps=1.0), "key 'skipped_steps': 1.0 is not a whole number"),
        (edited(loss_scaler0=7), "'loss_scaler0' is not a dict of 'loss_scale' and 'unskipped' alone, but an int"),
        (edited(loss_scaler1={"loss_scale": 2.0}), "'loss_scaler1' is not a dict of 'loss_scale' and 'unskipped'"),
        (edited(loss_scaler1={"loss_scale": 0.0, "unskipped": 0}), "'loss_scaler1': 'loss_scale' is 0.0"),
        (edited(loss_scaler1={"loss_scale": 10**400, "unskipped": 0}), "'loss_scaler1': 'loss_scale' is 1000"),
        (edited(loss_scaler1={"loss_scale": True, "unskipped": 0}), "'loss_scaler1': 'loss_scale' is True"),
        (edited(loss_scaler1={"loss_scale": 2.0, "unskipped": -1}), "'loss_scaler1': 'unskipped' is -1"),
        (edited(loss_scaler0={"loss_scale": 2.0, "unskipped": 1.5}), "'loss_scaler0': 'unskipped' is 1.5"),
        (edited(loss_scaler0={"loss_scale": 2.0, "unskipped": 0, "tracker": 1}), "but .'loss_scale', 'tracker', 'uns"),
    ],
)
def test_a_wrong_state_names_the_key_and_loads_nothing(state: Any, message: str) -> None:
    scalers = two()
    before = scalers.state_dict(0)
    with pytest.raises(CheckpointError, match=message) as caught:
        scalers.load_state_dict(state)
    assert str(caught.value).endswith("nothing was loaded")
    assert scalers.state_dict(0) == before
