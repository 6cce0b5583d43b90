"""docs/howto/schedulers.md: schedulers, averages and progress bars."""

from __future__ import annotations

import torch

from tests.behaviour.training import OVERFLOW, Training, started


def test_follow_steps_a_scheduler_after_steps_that_were_not_skipped() -> None:
    training = Training(started())
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, step_size=1, gamma=0.5)
    training.handle.follow(scheduler)
    training.step(OVERFLOW)
    assert scheduler.get_last_lr() == [0.5]
    training.step()
    assert scheduler.get_last_lr() == [0.25]


def test_what_follow_returns_stops_it() -> None:
    training, calls = Training(started()), []
    stop = training.handle.follow(lambda: calls.append(1))
    training.step()
    stop()
    training.step()
    assert calls == [1]


def test_last_step_skipped_is_about_the_step_before() -> None:
    training = Training(started())
    found = []
    for factor in (1.0, OVERFLOW, 1.0):
        training.step(factor)
        found.append(training.handle.last_step_skipped)
    assert found == [False, True, False]


def test_stats_and_postfix_have_scale_steps_and_skips() -> None:
    training = Training(started())
    for factor in (1.0, OVERFLOW, 1.0):
        training.step(factor)
    stats = training.handle.stats
    assert (stats["steps"], stats["skipped"]) == (3, 1)
    assert 512.0 in [float(str(value)) for value in training.handle.postfix().values() if str(value)[0].isdigit()]
