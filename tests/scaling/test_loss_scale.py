"""The loss scale: torch.amp.GradScaler's arithmetic, limits, arguments, checkpoints."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoamp.errors import AutoampError, CheckpointError, LossScaleError
from autoamp.scaling.device_scale import DeviceScale
from autoamp.scaling.late_flags import LateFlags
from autoamp.scaling.loss_scale import (
    DynamicLossScaler,
    LossScaler,
    StaticLossScaler,
    is_count,
    make_scaler,
)

FACTORS = st.sampled_from([(2.0, 0.5), (4.0, 0.25), (1.7, 0.3), (1.001, 0.999), (3.0, 0.1)])


@given(found=st.lists(st.booleans(), max_size=60), factors=FACTORS, interval=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_it_counts_and_rounds_as_torch_does(found: list[bool], factors: tuple[float, float], interval: int) -> None:
    growth, backoff = factors
    ours = DynamicLossScaler(1000.0, growth, backoff, interval, max_loss_scale=None)
    scale, tracker = torch.tensor(1000.0), torch.tensor(0, dtype=torch.int32)
    for found_inf in found:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(found_inf)), growth, backoff, interval)
        ours.update(found_inf)
        assert (ours.loss_scale, ours.unskipped) == (scale.item(), tracker.item())


def test_it_follows_grad_scaler_over_real_steps() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    ours = DynamicLossScaler(2.0**10, growth_interval=3)
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.0)
    for step in range(20):
        optimizer.zero_grad()
        theirs.scale(param.sum() * (math.inf if step in (4, 5, 11) else 1.0)).backward()
        theirs.step(optimizer)
        theirs.update()
        ours.update(step in (4, 5, 11))
        assert ours.loss_scale == theirs.get_scale()
    assert ours.unskipped == theirs.state_dict()["_growth_tracker"]


@given(found=st.lists(st.booleans(), max_size=400), low=st.integers(-126, 126), high=st.integers(-126, 126))
@settings(max_examples=40, deadline=None)
def test_the_scale_stays_in_its_limits(found: list[bool], low: int, high: int) -> None:
    low, high = sorted((low, high))
    scaler = DynamicLossScaler(2.0**16, 2.0**40, 2.0**-40, 1, min_loss_scale=2.0**low, max_loss_scale=2.0**high)
    assert 2.0**low <= scaler.loss_scale <= 2.0**high
    for found_inf in found:
        scaler.update(found_inf)
        assert 2.0**low <= scaler.loss_scale <= 2.0**high


def test_the_scale_stays_finite_and_above_zero_without_limits() -> None:
    scaler = DynamicLossScaler(max_loss_scale=None, growth_interval=1)
    for _ in range(400):
        scaler.update(True)
    assert scaler.loss_scale == 2.0**-126
    assert torch.tensor(scaler.loss_scale, dtype=torch.float32).item() > 0
    for _ in range(400):
        scaler.update(False)
    assert math.isfinite(torch.tensor(scaler.loss_scale, dtype=torch.float32).item())
    assert 1.0 / scaler.loss_scale >= 2.0**-126


def test_the_defaults_are_those_of_torch_and_apex() -> None:
    scaler = DynamicLossScaler()
    assert scaler.loss_scale == torch.amp.GradScaler("cpu").get_scale() == 2.0**16
    assert (scaler.growth_factor, scaler.backoff_factor, scaler.growth_interval) == (2.0, 0.5, 2000)
    assert scaler.max_loss_scale == 2.0**24
    assert scaler.checks
    for _ in range(2000 * 9):
        scaler.update(False)
    assert scaler.loss_scale == 2.0**24


def test_a_static_scale_never_changes() -> None:
    scaler = StaticLossScaler(128.0)
    for found_inf in (False, True, False, False):
        scaler.update(found_inf)
    assert scaler.loss_scale == 128.0
    assert scaler.unskipped == 2
    assert scaler.checks


def test_a_static_scale_of_one_checks_nothing() -> None:
    assert not StaticLossScaler().checks
    assert StaticLossScaler(0.5).checks
    assert DynamicLossScaler(1.0).checks


@pytest.mark.parametrize("value", [0, -1.0, math.inf, -math.inf, math.nan, True, "128", None, [1.0], 1e-45, 1e39])
def test_a_wrong_scale_is_named(value: Any) -> None:
    with pytest.raises(LossScaleError, match=r"loss_scale=.*128") as caught:
        StaticLossScaler(value)
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AutoampError)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("init_scale", 0.0),
        ("init_scale", math.nan),
        ("growth_factor", 1.0),
        ("growth_factor", math.inf),
        ("growth_factor", "2"),
        ("backoff_factor", 1.0),
        ("backoff_factor", 0.0),
        ("backoff_factor", math.nan),
        ("growth_interval", 0),
        ("growth_interval", 2.5),
        ("growth_interval", True),
        ("min_loss_scale", -1.0),
        ("min_loss_scale", 2.0**25),
        ("max_loss_scale", math.inf),
    ],
)
def test_a_wrong_argument_is_named(argument: str, value: Any) -> None:
    with pytest.raises(LossScaleError) as caught:
        DynamicLossScaler(**{argument: value})
    assert f"{argument}={value!r}" in str(caught.value)


def test_make_scaler_knows_all_spellings() -> None:
    for dynamic in (make_scaler(None, torch.float16), make_scaler("dynamic", torch.bfloat16)):
        assert isinstance(dynamic, DynamicLossScaler)
    for loss_scale, dtype, expected in [
        (None, torch.bfloat16, 1.0),
        (None, torch.float32, 1.0),
        (128, torch.float16, 128.0),
        (1.0, torch.float16, 1.0),
        ("128.0", torch.float16, 128.0),
    ]:
        scaler = make_scaler(loss_scale, dtype)
        assert isinstance(scaler, StaticLossScaler)
        assert scaler.loss_scale == expected
    given_scaler: LossScaler = StaticLossScaler(4.0)
    assert make_scaler(given_scaler, torch.float16) is given_scaler
    limited = make_scaler("dynamic", torch.float16, min_loss_scale=2.0, max_loss_scale=64.0)
    assert isinstance(limited, DynamicLossScaler)
    assert (limited.min_loss_scale, limited.loss_scale) == (2.0, 64.0)


@pytest.mark.parametrize("value", ["dynamite", "", "inf", "-3", "nan", False, [128]])
def test_make_scaler_refuses_the_rest(value: Any) -> None:
    with pytest.raises(LossScaleError, match="loss_scale="):
        make_scaler(value, torch.float16)


def test_a_resumed_scaler_goes_on_as_the_first() -> None:
    first, second = DynamicLossScaler(growth_interval=5), DynamicLossScaler(growth_interval=5)
    pattern = [False, False, True, False, False, False, False]
    for found_inf in pattern:
        first.update(found_inf)
    second.load_state_dict(first.state_dict())
    assert first.state_dict() == second.state_dict() == {"loss_scale": 2.0**15, "unskipped": 4}
    for found_inf in pattern:
        first.update(found_inf)
        second.update(found_inf)
        assert first.state_dict() == second.state_dict()


def test_a_checkpoint_wins_over_the_arguments() -> None:
    static = StaticLossScaler(1.0)
    static.load_state_dict({"loss_scale": 128.0, "unskipped": 3})
    assert (static.loss_scale, static.unskipped, static.checks) == (128.0, 3, True)
    limited = DynamicLossScaler(max_loss_scale=2.0**10)
    limited.load_state_dict({"loss_scale": 2.0**20, "unskipped": 1})
    assert limited.loss_scale == 2.0**10


def test_a_count_beyond_the_interval_still_grows() -> None:
    scaler = DynamicLossScaler(growth_interval=5)
    scaler.load_state_dict({"loss_scale": 4.0, "unskipped": 1000})
    scaler.update(False)
    assert scaler.loss_scale == 8.0


GOOD = {"loss_scale": 4.0, "unskipped": 1}


@pytest.mark.parametrize("scaler", [StaticLossScaler(2.0), DynamicLossScaler(2.0)], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("state", "named"),
    [
        (None, "NoneType"),
        ([1.0, 2], "list"),
        ({"unskipped": 1}, "loss_scale"),
        ({"loss_scale": 4.0}, "unskipped"),
        ({**GOOD, "loss_scale": 0.0}, "loss_scale"),
        ({**GOOD, "loss_scale": math.nan}, "loss_scale"),
        ({**GOOD, "loss_scale": math.inf}, "loss_scale"),
        ({**GOOD, "loss_scale": "4"}, "loss_scale"),
        ({**GOOD, "loss_scale": True}, "loss_scale"),
        ({**GOOD, "unskipped": -1}, "unskipped"),
        ({**GOOD, "unskipped": 1.5}, "unskipped"),
        ({**GOOD, "unskipped": False}, "unskipped"),
        ({**GOOD, "growth_tracker": 1}, "growth_tracker"),
    ],
)
def test_a_bad_checkpoint_changes_nothing(scaler: LossScaler, state: Any, named: str) -> None:
    before = scaler.state_dict()
    with pytest.raises(CheckpointError, match=named) as caught:
        scaler.check_state_dict(state, "loss_scaler7")
    assert "loss_scaler7" in str(caught.value)
    with pytest.raises(CheckpointError):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before
    scaler.check_state_dict(GOOD, "loss_scaler7")
    assert scaler.state_dict() == before


def test_a_scale_beyond_any_float_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="loss_scale"):
        DynamicLossScaler().load_state_dict({"loss_scale": 10**400, "unskipped": 0})


# -- updates whose flags stay on the device --


class _Late:
    """Flags on a CPU that are late all the same, by as many asks as they are told."""

    def __init__(self, flags: Sequence[Tensor], asks: int) -> None:
        self._flags, self._asks = flags, asks

    def arrived(self) -> bool:
        self._asks -= 1
        return self._asks < 0

    def flags(self) -> list[bool]:
        return [bool(flag) for flag in self._flags]


def deferring(scaler: LossScaler, asks: int = 2, batch: int = 4) -> LossScaler:
    scaler.late = LateFlags(lambda flags: _Late(flags, asks), lambda device: True, batch)
    return scaler


def number(scale: Any) -> float:
    return scale.value.item() if isinstance(scale, DeviceScale) else scale


@given(
    found=st.lists(st.booleans(), max_size=60),
    factors=FACTORS,
    interval=st.integers(1, 5),
    batch=st.integers(1, 16),
    reads=st.sets(st.integers(0, 59), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_on_a_device_the_rule_is_the_same(
    found: list[bool], factors: tuple[float, float], interval: int, batch: int, reads: set[int]
) -> None:
    kwargs = {"min_loss_scale": 0.25, "max_loss_scale": 4096.0}
    host = DynamicLossScaler(1000.0, *factors, interval, **kwargs)
    device = deferring(DynamicLossScaler(1000.0, *factors, interval, **kwargs), batch=batch)
    told: list[bool] = []
    for step, found_inf in enumerate(found):
        scale = device.scale_at_hand()
        assert number(scale) == host.loss_scale
        if isinstance(scale, DeviceScale):
            assert scale.lowest <= host.loss_scale
        host.update(found_inf)
        device.update_later(torch.tensor(float(found_inf)), told.append)
        if step in reads:
            assert (device.loss_scale, device.unskipped) == (host.loss_scale, host.unskipped)
    assert device.state_dict() == host.state_dict()
    assert told == found


def test_a_static_scale_is_known_and_its_count_comes_late() -> None:
    scaler = deferring(StaticLossScaler(8.0))
    for found_inf in (True, False, False):
        scaler.update_later(torch.tensor(float(found_inf)), lambda found: None)
        assert scaler.scale_at_hand() == 8.0
    assert len(scaler.late) == 3
    assert scaler.state_dict() == {"loss_scale": 8.0, "unskipped": 2}


def test_an_update_by_the_host_comes_after_those_of_the_device() -> None:
    scaler = deferring(DynamicLossScaler(64.0, growth_interval=1))
    scaler.update_later(torch.tensor(1.0), lambda found: None)
    scaler.update(True)
    assert scaler.scale_at_hand() == 16.0
    scaler.update_later(torch.tensor(0.0), lambda found: None)
    assert number(scaler.scale_at_hand()) == 32.0


@pytest.mark.parametrize(
    ("name", "value"), [("backoff_factor", 0.25), ("max_loss_scale", 2.0**7), ("growth_interval", 1)]
)
def test_a_setting_holds_for_the_updates_after_it(name: str, value: float) -> None:
    host = DynamicLossScaler(2.0**6, growth_interval=3)
    device = deferring(DynamicLossScaler(2.0**6, growth_interval=3))
    for step, found_inf in enumerate([False, True, False, False, True, False, False, False, False]):
        if step == 4:
            setattr(host, name, value)
            setattr(device, name, value)
        host.update(found_inf)
        device.update_later(torch.tensor(float(found_inf)), lambda found: None)
        assert number(device.scale_at_hand()) == host.loss_scale


def test_a_checkpoint_puts_an_end_to_what_is_under_way() -> None:
    scaler, told = deferring(DynamicLossScaler(64.0)), []
    scaler.update_later(torch.tensor(1.0), told.append)
    scaler.load_state_dict({"loss_scale": 128.0, "unskipped": 5000})
    assert (told, scaler.scale_at_hand()) == ([True], 128.0)
    # The count of a longer interval: the next clean step grows the scale, on a device too.
    scaler.update_later(torch.tensor(0.0), told.append)
    assert number(scaler.scale_at_hand()) == scaler.loss_scale == 256.0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_has_what_was_under_way_and_goes_its_own_way(copied: Any) -> None:
    scaler = deferring(DynamicLossScaler(64.0))
    scaler.update_later(torch.tensor(1.0), lambda found: None)
    other = deferring(copied(scaler))
    assert (other.scale_at_hand(), scaler.scale_at_hand()) == (32.0, 32.0)
    other.update_later(torch.tensor(1.0), lambda found: None)
    assert (other.loss_scale, scaler.loss_scale) == (16.0, 32.0)


class _Doubled(DynamicLossScaler):
    def update(self, found_inf: bool) -> None:
        super().update(found_inf)


@pytest.mark.parametrize(
    "scaler",
    [
        _Doubled(),
        DynamicLossScaler(min_loss_scale=0.1),
        DynamicLossScaler(max_loss_scale=2.0**126, growth_factor=10.0),
    ],
)
def test_a_rule_that_a_device_would_not_follow_stays_on_the_host(scaler: DynamicLossScaler) -> None:
    assert not deferring(scaler).serves_device(torch.device("cpu"))


def test_what_serves_a_device() -> None:
    assert deferring(DynamicLossScaler()).serves_device(torch.device("cpu"))
    assert deferring(StaticLossScaler(2.0)).serves_device(torch.device("cpu"))
    assert not DynamicLossScaler().serves_device(torch.device("cpu"))
    assert DynamicLossScaler().serves_device(torch.device("cuda"))


def test_far_above_one_flags_travel_together_and_near_it_at_once() -> None:
    sent: list[int] = []

    def send(flags: Sequence[Tensor]) -> _Late:
        sent.append(len(flags))
        return _Late(flags, 0)

    for scale in (2.0**24, 2.0**10, 8.0):
        scaler = DynamicLossScaler(scale)
        scaler.late = LateFlags(send, lambda device: True)
        for _ in range(32):
            scaler.update_later(torch.tensor(0.0), lambda found: None)
    assert sent[:2] == [16, 16]
    assert set(sent[2:-32]) == {5}
    assert sent[-32:] == [1] * 32


def test_settings_are_those_of_an_instance() -> None:
    assert not hasattr(DynamicLossScaler, "growth_factor")
    assert DynamicLossScaler(growth_factor=4.0).growth_factor == 4.0


@pytest.mark.parametrize("value", [0, 3, torch.iinfo(torch.int64).max])
def test_whole_numbers_from_0_on_are_counts(value: int) -> None:
    assert is_count(value)
    assert is_count(value + 1, 1)


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, torch.tensor(1)])
def test_what_is_no_count(value: Any) -> None:
    assert not is_count(value)
    assert not is_count(0, 1)
