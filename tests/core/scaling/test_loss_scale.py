"""The loss scale: torch.amp.GradScaler's arithmetic, limits, arguments, checkpoints; on the host and on a device."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoamp.core import DynamicLossScaler, LossScaler, StaticLossScaler, UnreadFlags, make_scaler
from autoamp.errors import AutoampError, LossScaleError

CPU = torch.device("cpu")
FACTORS = st.sampled_from([(2.0, 0.5), (4.0, 0.25), (1.7, 0.3), (1.001, 0.999), (3.0, 0.1)])
LIMITS = st.sampled_from([(2.0**-126, 2.0**126), (0.25, 4096.0), (700.0, 1500.0)])


def test_the_scale_stays_finite_and_above_zero_without_limits() -> None:
    scaler = DynamicLossScaler(max_loss_scale=None, growth_interval=1)
    for _ in range(400):
        scaler.update(True)
    assert scaler.loss_scale == 2.0**-126
    for _ in range(400):
        scaler.update(False)
    assert scaler.loss_scale == 2.0**126


def test_the_defaults_are_those_of_torch_and_apex() -> None:
    scaler = DynamicLossScaler()
    assert scaler.loss_scale == torch.amp.GradScaler("cpu").get_scale() == 2.0**16
    assert (scaler.growth_factor, scaler.backoff_factor, scaler.growth_interval) == (2.0, 0.5, 2000)
    for _ in range(2000 * 9):
        scaler.update(False)
    assert scaler.loss_scale == scaler.max_loss_scale == 2.0**24


def test_a_static_scale_of_one_alone_checks_nothing() -> None:
    assert not StaticLossScaler().checks
    assert all(scaler.checks for scaler in (StaticLossScaler(0.5), DynamicLossScaler(1.0)))


@pytest.mark.parametrize("value", [0, -1.0, math.inf, -math.inf, math.nan, True, "128", None, [1.0], 1e-45, 1e39])
def test_a_wrong_scale_is_named(value: Any) -> None:
    with pytest.raises(LossScaleError, match=r"loss_scale=.*128") as caught:
        StaticLossScaler(value)
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AutoampError)


WRONG: dict[str, list[Any]] = {
    "init_scale": [0.0, math.nan],
    "growth_factor": [1.0, math.inf, "2"],
    "backoff_factor": [1.0, 0.0, math.nan],
    "growth_interval": [0, 2.5, True],
    "min_loss_scale": [-1.0, 2.0**25],
    "max_loss_scale": [math.inf],
}


@pytest.mark.parametrize(("argument", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_argument_is_named(argument: str, value: Any) -> None:
    with pytest.raises(LossScaleError) as caught:
        DynamicLossScaler(**{argument: value})
    assert f"{argument}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("loss_scale", "dtype", "scale"),
    [
        (None, torch.float16, "dynamic"), ("dynamic", torch.bfloat16, "dynamic"), (None, torch.bfloat16, 1.0),
        (None, torch.float32, 1.0), (128, torch.float16, 128.0),
    ],
)  # fmt: skip
def test_make_scaler_knows_all_spellings(loss_scale: Any, dtype: torch.dtype, scale: Any) -> None:
    made = make_scaler(loss_scale, dtype, min_loss_scale=2.0, max_loss_scale=64.0)
    assert isinstance(made, DynamicLossScaler if scale == "dynamic" else StaticLossScaler)
    assert make_scaler(made, torch.float16) is made
    default = make_scaler(loss_scale, dtype)
    if isinstance(made, DynamicLossScaler):
        assert isinstance(default, DynamicLossScaler)
        assert (made.min_loss_scale, made.loss_scale) == (2.0, 64.0)
        assert (default.loss_scale, default.max_loss_scale) == (2.0**16, 2.0**24)
    else:
        assert made.loss_scale == scale


@pytest.mark.parametrize("value", ["dynamite", "", "128.0", "inf", "-3", "nan", False, [128]])
def test_make_scaler_refuses_the_rest(value: Any) -> None:
    with pytest.raises(LossScaleError, match="loss_scale="):
        make_scaler(value, torch.float16)


# -- checkpoints --


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


# -- updates whose flags stay on the device --


def on_device(scaler: Any, batch: int = 3) -> Any:
    scaler.unread = UnreadFlags(("cpu",), batch)
    return scaler


Tell = Callable[[bool], None]


def update(scaler: LossScaler, found_inf: bool, tell: Tell = lambda found: None) -> None:
    """Move on by one step as a step does: on the device where the scaler serves it, else on the host."""
    if scaler.serves_device(CPU):
        scaler.update_later(torch.tensor(float(found_inf)), tell)
    else:
        scaler.update(found_inf)
        tell(found_inf)


SETTINGS = {
    "growth_factor": 3.0, "backoff_factor": 0.2, "growth_interval": 2, "min_loss_scale": 64.0, "max_loss_scale": 1024.0,
}  # fmt: skip


@given(
    found=st.lists(st.booleans(), max_size=60),
    factors=FACTORS,
    limits=LIMITS,
    start=st.sampled_from([1000.0, 4096.0, 3.0, 0.75]),
    interval=st.integers(1, 5),
    batch=st.integers(1, 16),
    asked=st.dictionaries(st.integers(0, 59), st.sampled_from(["scale", "count", "update", *SETTINGS]), max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_the_rule_on_the_host_and_on_a_device_is_that_of_torch(
    found: list[bool], factors: tuple[float, float], limits: tuple[float, float], start: float, interval: int,
    batch: int, asked: dict[int, str],
) -> None:  # fmt: skip
    host, device = (DynamicLossScaler(start, *factors, interval, *limits) for _ in range(2))
    on_device(device, batch)
    scale, tracker = torch.tensor(start).clamp(*limits), torch.tensor(0, dtype=torch.int32)
    told: list[tuple[bool, float]] = []
    scales: list[float] = []
    for step, found_inf in enumerate(found):
        scales.append(host.loss_scale)
        unread = len(device.unread)
        assert float(device.scale_without_sync()) == host.loss_scale == scale.item()
        # No flag was read for that.
        assert len(device.unread) == unread
        action = asked.get(step)
        if action in SETTINGS:
            for scaler in (host, device):
                setattr(scaler, action, SETTINGS[action])
        host.update(found_inf)
        if action == "update":
            device.update(found_inf)
            told.append((found_inf, math.nan))
        else:
            update(device, found_inf, lambda found: told.append((found, device.scale_before)))
        tracker.clamp_(max=host.growth_interval - 1)
        torch._amp_update_scale_(
            scale,
            tracker,
            torch.tensor(float(found_inf)),
            host.growth_factor,
            host.backoff_factor,
            host.growth_interval,
        )
        scale.clamp_(host.min_loss_scale, host.max_loss_scale)
        if action == "scale":
            assert device.loss_scale == host.loss_scale
        if action == "count":
            assert (device.unskipped, device.overflows) == (host.unskipped, host.overflows) == (
                tracker.item(), sum(found[: step + 1])
            )  # fmt: skip
    assert (device.state_dict(), device.overflows) == (host.state_dict(), host.overflows)
    assert [flag for flag, _ in told] == found
    assert all(math.isnan(scale) or scale == scales[step] for step, (_, scale) in enumerate(told))


def test_a_static_scale_is_known_and_its_count_comes_later() -> None:
    scaler = on_device(StaticLossScaler(8.0))
    for found_inf in (True, False, False):
        update(scaler, found_inf)
    assert (scaler.scale_without_sync(), len(scaler.unread)) == (8.0, 3)
    assert (scaler.state_dict(), scaler.overflows) == ({"loss_scale": 8.0, "unskipped": 2}, 1)


def test_loading_a_checkpoint_ends_pending_updates() -> None:
    scaler, told = on_device(DynamicLossScaler(64.0)), []
    update(scaler, True, lambda found: told.append((found, scaler.scale_before)))
    scaler.load_state_dict({"loss_scale": 128.0, "unskipped": 5000})
    assert (told, scaler.scale_without_sync()) == ([(True, 64.0)], 128.0)
    # The count of a longer interval: the next clean step grows the scale, on a device too.
    update(scaler, False)
    assert float(scaler.scale_without_sync()) == scaler.loss_scale == 256.0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
@pytest.mark.parametrize("make", [DynamicLossScaler, StaticLossScaler])
def test_a_copy_has_the_pending_updates_and_is_independent(copied: Any, make: Any) -> None:
    scaler = on_device(make(64.0))
    update(scaler, True)
    other = on_device(copied(scaler))
    update(other, True)
    assert (other.overflows, scaler.overflows) == (2, 1)
    assert other.loss_scale == (16.0 if make is DynamicLossScaler else 64.0)
    assert scaler.loss_scale == (32.0 if make is DynamicLossScaler else 64.0)


class Own(DynamicLossScaler):
    def update(self, found_inf: bool) -> None:
        super().update(found_inf)


class OfTheProgram(LossScaler):
    checks = True

    def update(self, found_inf: bool) -> None:
        """Keep the scale."""


@pytest.mark.parametrize(
    ("scaler", "serves"),
    [
        (DynamicLossScaler(), True), (StaticLossScaler(2.0), True), (Own(), False), (OfTheProgram(8.0), False),
        # A limit that fp32 rounds, and a product that it does not hold: the rule is the same there.
        (DynamicLossScaler(min_loss_scale=0.1), True),
        (DynamicLossScaler(max_loss_scale=2.0**126, growth_factor=10.0), True),
        # An overflow would bring it below 1.
        (DynamicLossScaler(1.0), False), (DynamicLossScaler(2.0), True),
    ],
)  # fmt: skip
def test_which_rules_run_on_a_device(scaler: LossScaler, serves: bool) -> None:
    assert scaler.serves_device(torch.device("cuda")) is serves
    assert not scaler.serves_device(CPU)
    assert on_device(scaler).serves_device(CPU) is serves


@pytest.mark.parametrize(("scale", "most"), [(2.0**24, 16), (2.0**10, 5), (8.0, 1)])
def test_flags_are_read_together_unless_the_scale_is_near_one(scale: float, most: int) -> None:
    scaler, unread = on_device(DynamicLossScaler(scale), 16), set()
    for _ in range(40):
        update(scaler, False)
        unread.add(len(scaler.unread))
    assert max(unread) == most


def test_a_subclass_may_have_a_setting_as_its_own_attribute() -> None:
    class Mine(DynamicLossScaler):
        growth_interval = 2000

    scaler = Mine(init_scale=1024.0, growth_interval=10)
    for _ in range(5):
        scaler.update(False)
    scaler.growth_interval = 3
    for _ in range(6):
        scaler.update(False)
    assert scaler.loss_scale > 1024.0


class Growing(LossScaler):
    """A rule of a program's own, with names that another scaler has for its settings."""

    checks = True  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(8.0)
        self.growth_factor = 3.0

    def update(self, found_inf: bool) -> None:
        self._loss_scale *= self.growth_factor


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_of_a_programs_own_scaler_goes_on(copied: Any) -> None:
    twin = copied(Growing())
    twin.update(False)
    assert twin.loss_scale == 24.0


class Scheduled(DynamicLossScaler):
    """Has a setting that follows a schedule."""

    factor = 2.0

    @property
    def growth_factor(self) -> float:  # type: ignore[override]
        return self.factor

    @growth_factor.setter
    def growth_factor(self, factor: float) -> None:
        self.factor = factor


def test_a_setting_may_be_a_property_of_a_subclass() -> None:
    scaler = Scheduled(8.0, growth_interval=1)
    scaler.factor = 4.0
    scaler.update(False)
    assert scaler.loss_scale == 32.0


def test_limits_that_are_set_later_hold_from_the_next_update_on() -> None:
    scaler = DynamicLossScaler(2.0**10)
    scaler.max_loss_scale = 2.0**8
    scaler.update(False)
    assert scaler.loss_scale == 2.0**8
