"""Which scaler hears what when the verdicts of one step are settled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from autoamp.scaling import verdict as verdicts
from autoamp.scaling.late_flags import LateFlags
from autoamp.scaling.loss_scale import DynamicLossScaler, LossScaler, StaticLossScaler
from autoamp.scaling.verdict import Verdict, newly_found, read_verdicts, settle_on_device, settle_verdicts


class Recording(StaticLossScaler):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(2.0)
        self.heard: list[bool] = []

    def update(self, found_inf: bool) -> None:
        self.heard.append(found_inf)


def verdict(scaler: LossScaler, *flags: float) -> Verdict:
    return Verdict(scaler, 2.0, [torch.tensor([flag]) for flag in flags])


def test_micro_batches_count_once() -> None:
    scaler = Recording()
    assert settle_verdicts([verdict(scaler, 0.0) for _ in range(4)]) is None
    assert scaler.heard == [False]


def test_the_first_overflow_is_to_blame() -> None:
    scaler = Recording()
    all_of_them = [verdict(scaler, flag) for flag in (0.0, 1.0, 1.0)]
    assert settle_verdicts(all_of_them) is all_of_them[1]
    assert scaler.heard == [True]


def test_after_an_overflow_others_hear_nothing() -> None:
    before, blamed, after = Recording(), Recording(), Recording()
    settle_verdicts([verdict(before, 0.0), verdict(blamed, 1.0), verdict(after, 1.0), verdict(blamed, 1.0)])
    assert (before.heard, blamed.heard, after.heard) == ([False], [True], [])


def test_any_device_overflows_the_block() -> None:
    scaler, other = Recording(), Recording()
    pending = [verdict(other, 0.0, 0.0), verdict(scaler, 0.0, 1.0)]
    assert settle_verdicts(pending) is pending[1]
    assert (other.heard, scaler.heard) == ([False], [True])


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_a_shared_verdict_is_read_and_counted_once(flag: float, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = verdicts.found_any
    monkeypatch.setattr(verdicts, "found_any", lambda found: reads.append(len(found)) or read(found))
    scaler = Recording()
    shared = verdict(scaler, flag)
    first, second = settle_verdicts([shared]), settle_verdicts([shared])
    assert first is second
    assert (first is shared) == bool(flag)
    assert scaler.heard == [bool(flag)]
    assert reads == [1]


def test_a_window_shared_in_part_counts_once() -> None:
    scaler = Recording()
    shared = verdict(scaler, 0.0)
    settle_verdicts([shared])
    settle_verdicts([shared, verdict(scaler, 0.0)])
    assert scaler.heard == [False]
    settle_verdicts([shared, verdict(scaler, 1.0)])
    assert scaler.heard == [False, True]


def test_nothing_pending() -> None:
    assert settle_verdicts([]) is None


# -- settled with nothing read --


def deferring(scaler: LossScaler) -> LossScaler:
    scaler.late = LateFlags(Parcel, lambda device: True)
    return scaler


class Parcel:
    def __init__(self, flags: Sequence[torch.Tensor]) -> None:
        self.values = [bool(flag) for flag in flags]

    def arrived(self) -> bool:
        return True

    def flags(self) -> list[bool]:
        return self.values


@pytest.mark.parametrize("flags", [[(0.0,)], [(1.0,)], [(0.0,), (2.0,)], [(0.0, 1.0)], [(0.0, 0.0), (0.0,)]])
def test_a_step_is_settled_later(flags: list[tuple[float, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "found_any", None)
    scaler, told = deferring(DynamicLossScaler(1024.0)), []
    pending = [verdict(scaler, *given) for given in flags]
    found = settle_on_device(pending, told.append)
    overflowed = any(map(any, flags))
    assert found is not None
    assert (found.shape, bool(found)) == ((), overflowed)
    assert all(one.counted and one.overflowed is None for one in pending)
    assert told == []
    assert scaler.loss_scale == (512.0 if overflowed else 1024.0)
    assert told == [overflowed]


def test_the_next_optimizer_of_a_block_gets_the_flag_and_the_scaler_hears_nothing() -> None:
    scaler, told = deferring(DynamicLossScaler(1024.0)), []
    shared = verdict(scaler, 1.0)
    for _ in range(2):
        found = settle_on_device([shared], told.append)
        assert found is not None
        assert bool(found)
    assert scaler.loss_scale == 512.0
    assert told == [True, True]


def test_what_must_be_read_is_left_alone() -> None:
    one, other = deferring(DynamicLossScaler(1024.0)), deferring(DynamicLossScaler(1024.0))
    counted = verdict(one, 0.0)
    counted.counted = True
    known = verdict(one, 0.0)
    read_verdicts([known])
    for pending in (
        [],
        [known],
        [verdict(one, 0.0), verdict(other, 0.0)],
        [counted, verdict(one, 0.0)],
        [verdict(DynamicLossScaler(1024.0), 0.0)],
        [verdict(Recording(), 0.0)],
    ):
        assert settle_on_device(pending, lambda found: None) is None
        assert not any(one.counted for one in pending if one is not counted)


def test_flags_are_read_with_those_that_the_scaler_has_not_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, told = deferring(DynamicLossScaler(1024.0)), []
    settle_on_device([verdict(scaler, 1.0)], told.append)
    with monkeypatch.context() as patch:
        patch.setattr(verdicts, "found_any", None)
        pending = [verdict(scaler, 0.0, 1.0), verdict(scaler, 0.0)]
        read_verdicts(pending)
    assert [one.overflowed for one in pending] == [True, False]
    assert (told, scaler.loss_scale) == ([True], 512.0)


def test_verdicts_of_one_block_are_told_once() -> None:
    scaler = Recording()
    first = verdict(scaler, 0.0)
    second = Verdict(scaler, 2.0, [torch.ones(1)], block=first)
    settle_verdicts([first])
    assert second.counted
    assert settle_verdicts([second]) is second
    assert scaler.heard == [False]


@pytest.mark.parametrize("known", [False, True], ids=["unread", "read"])
def test_what_an_earlier_block_left_is_not_new(known: bool) -> None:
    scaler = Recording()
    clean, overflowed = verdict(scaler, 0.0), verdict(scaler, 1.0)
    if known:
        read_verdicts([clean, overflowed])
    found = [torch.tensor([1.0])]
    assert [flag.item() for flag in newly_found(found, [])] == [1.0]
    assert [flag.item() for flag in newly_found(found, [clean])] == [1.0]
    assert sum(flag.item() for flag in newly_found(found, [clean, overflowed, overflowed])) == 0.0
    assert found[0].item() == 1.0
    assert scaler.heard == []


def test_flags_of_other_devices_say_nothing_here() -> None:
    scaler = Recording()
    elsewhere = Verdict(scaler, 2.0, [torch.ones(1, device="meta")])
    assert [flag.item() for flag in newly_found([torch.ones(1)], [elsewhere])] == [1.0]
