"""What is counted of steps and skips, also where a step is heard of later than it is taken."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from autoamp.scaling import DynamicLossScaler, StaticLossScaler, UnreadFlags
from autoamp.stepping import Skips
from tests.stepping.guarded import Owner, Setup


def test_steps_that_are_heard_of_later_are_waited_for_and_counted_in_order() -> None:
    owner = Owner()
    skips, scaler = Skips("SGD", owner), StaticLossScaler(4.0)
    unread = UnreadFlags(("cpu",))
    skips.wait_by(unread)
    unread.add(torch.ones(1), lambda found: skips.tell(scaler, 4.0, found))
    assert (skips.news(), owner.skipped) == (0, 0)
    skips.count(True, scaler, 4.0)
    assert (skips.total, skips.in_a_row, skips.last, owner.skipped) == (2, 2, True, 2)
    assert (skips.news(), skips.news()) == (2, 0)
    skips.count(False)
    assert (skips.total, skips.in_a_row, skips.last) == (2, 0, False)


def test_skips_at_the_lowest_scale_are_counted_in_a_row() -> None:
    skips, scaler = Skips("SGD", Owner()), DynamicLossScaler(4.0, min_loss_scale=2.0)
    for scale, count in ((4.0, 0), (2.0, 1), (2.0, 2), (4.0, 0), (2.0, 1)):
        skips.count(True, scaler, scale)
        assert skips.at_lowest == count
    # As where only the device knew of it.
    skips.tell(scaler, 2.0, True)
    assert skips.at_lowest == 2
    skips.count(True, scaler, 2.0)
    skips.count(False)
    assert skips.at_lowest == 0
    # A scale that never moves has no limit that it came down to.
    skips.count(True, StaticLossScaler(2.0), 2.0)
    assert skips.at_lowest == 0


def test_skips_are_logged_at_powers_of_two(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup()
    with caplog.at_level(logging.WARNING, "autoamp.stepping"):
        for _ in range(9):
            setup.optimizer.zero_grad()
            setup.backward(math.inf)
            setup.optimizer.step()
    assert len(caplog.records) == 4
    assert "loss scale 1024, the next is 512 (skipped 1, in a row 1)" in caplog.text
    assert "skipped 8, in a row 8" in caplog.text
