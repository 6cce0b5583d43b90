"""Counts of steps and skips, also of flags that are read later."""

from __future__ import annotations

import logging
import math

import pytest

from tests.stepping.guarded import Setup


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
