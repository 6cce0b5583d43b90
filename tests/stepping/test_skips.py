"""Counts of steps and skips, also of flags that are read later."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from autoamp.scaling import StaticLossScaler, UnreadFlags
from autoamp.stepping import Skips
from autoamp.stepping.skips import OwnSteps, StepCounts
from tests.stepping.guarded import Owner, Setup


def test_steps_whose_flags_are_read_later_are_counted_in_order() -> None:
    owner = Owner()
    skips, scaler = Skips("SGD", owner), StaticLossScaler(4.0)
    unread = UnreadFlags(("cpu",))
    late = skips.begin()
    skips.wait_by(unread)
    unread.add(torch.ones(1), lambda found: skips.tell(late, scaler, 4.0, found))
    assert (skips.in_a_row_known, owner.skipped) == (0, 0)
    assert not skips.begin().skipped
    skips.count(True, scaler, 4.0)
    assert (skips.total, skips.in_a_row, skips.step.skipped, owner.skipped) == (2, 2, True, 2)
    assert skips.in_a_row_known == 2
    skips.begin()
    skips.count(False)
    assert (skips.total, skips.in_a_row, skips.step.skipped, late.skipped) == (2, 0, False, True)


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_the_record_of_a_step_reads_the_flag_that_the_optimizer_took(found: float) -> None:
    skips = Skips("SGD", Owner())
    step = skips.begin()
    step.flag = torch.full((), found)
    skips.count(False)
    assert step.skipped is bool(found)


def test_steps_of_all_kinds_are_counted_together() -> None:
    counts, own = StepCounts(lambda: None), Skips("FP16_Optimizer", Owner())
    assert (counts.all, counts.all_skipped, counts.loss_scale(2.0)) == (0, 0, 2.0)
    counts.steps, counts.plain = 4, 2
    counts.add_skip()
    counts.own_scale = 16.0
    assert (counts.all, counts.skipped, counts.all_skipped, counts.loss_scale(2.0)) == (6, 1, 1, 16.0)
    counts.own, own.steps = OwnSteps({own: StaticLossScaler(8.0)}), 3
    own.count(True, StaticLossScaler(8.0), 8.0)
    assert (counts.all, counts.skipped, counts.all_skipped, counts.loss_scale(2.0)) == (9, 1, 2, 8.0)
    counts.reset(5)
    assert (counts.all, counts.skipped) == (5, 5)


def test_of_optimizers_that_scale_themselves_the_last_gives_the_scale() -> None:
    first, second, last = (Skips(name, Owner()) for name in ("SGD", "Adam", "LBFGS"))
    shared, other = StaticLossScaler(4.0), StaticLossScaler(8.0)
    own = OwnSteps({first: shared, second: shared, last: other})
    first.steps = last.steps = 2
    second.count(True, shared, 4.0)
    assert (own.loss_scale, own.losses, own.steps, own.skipped) == (8.0, [shared, other], 4, 1)


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
