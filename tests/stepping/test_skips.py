"""What is counted of steps and skips, also where a step is heard of later than it is taken."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from autoamp.scaling import StaticLossScaler, UnreadFlags
from autoamp.stepping import Skips
from tests.stepping.guarded import Owner, Setup


def test_steps_that_are_heard_of_later_are_waited_for_and_counted_in_order() -> None:
    owner = Owner()
    skips, scaler = Skips("SGD", owner), StaticLossScaler(4.0)
    unread = UnreadFlags(("cpu",))
    skips.wait_by(unread)
    unread.add(torch.ones(1), lambda found: skips.tell(scaler, 4.0, found))
    assert (skips.in_a_row_known, owner.skipped) == (0, 0)
    skips.count(True, scaler, 4.0)
    assert (skips.total, skips.in_a_row, skips.last, owner.skipped) == (2, 2, True, 2)
    assert skips.in_a_row_known == 2
    skips.count(False)
    assert (skips.total, skips.in_a_row, skips.last) == (2, 0, False)


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
