"""Which scaler hears what when the verdicts of one step are settled."""

from __future__ import annotations

import pytest
import torch

from autoamp import verdicts
from autoamp.scaling import LossScaler, StaticLossScaler
from autoamp.verdicts import Verdict, settle


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
    assert settle([verdict(scaler, 0.0) for _ in range(4)]) is None
    assert scaler.heard == [False]


def test_the_first_overflow_is_to_blame() -> None:
    scaler = Recording()
    all_of_them = [verdict(scaler, flag) for flag in (0.0, 1.0, 1.0)]
    assert settle(all_of_them) is all_of_them[1]
    assert scaler.heard == [True]


def test_after_an_overflow_others_hear_nothing() -> None:
    before, blamed, after = Recording(), Recording(), Recording()
    settle([verdict(before, 0.0), verdict(blamed, 1.0), verdict(after, 1.0), verdict(blamed, 1.0)])
    assert (before.heard, blamed.heard, after.heard) == ([False], [True], [])


def test_any_device_overflows_the_block() -> None:
    scaler, other = Recording(), Recording()
    pending = [verdict(other, 0.0, 0.0), verdict(scaler, 0.0, 1.0)]
    assert settle(pending) is pending[1]
    assert (other.heard, scaler.heard) == ([False], [True])


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_a_shared_verdict_is_read_and_counted_once(flag: float, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = verdicts.found_any
    monkeypatch.setattr(verdicts, "found_any", lambda found: reads.append(len(found)) or read(found))
    scaler = Recording()
    shared = verdict(scaler, flag)
    first, second = settle([shared]), settle([shared])
    assert first is second
    assert (first is shared) == bool(flag)
    assert scaler.heard == [bool(flag)]
    assert reads == [1]


def test_a_window_shared_in_part_counts_once() -> None:
    scaler = Recording()
    shared = verdict(scaler, 0.0)
    settle([shared])
    settle([shared, verdict(scaler, 0.0)])
    assert scaler.heard == [False]
    settle([shared, verdict(scaler, 1.0)])
    assert scaler.heard == [False, True]


def test_nothing_pending() -> None:
    assert settle([]) is None
