"""docs/howto/accumulation.md: gradient accumulation."""

from __future__ import annotations

from tests.behaviour.training import OVERFLOW, Training, started


def test_gradients_have_their_true_value_after_each_block() -> None:
    training = Training(started())
    training.backward()
    assert training.grad == 1.0
    training.backward(2.0)
    assert training.grad == 3.0


def test_an_overflow_in_any_block_skips_the_step_and_halves_the_scale_once() -> None:
    training = Training(started())
    training.backward(OVERFLOW)
    training.backward()
    training.optimizer.step()
    assert training.weight == 1.0
    assert (training.handle.skipped_steps, training.handle.loss_scale) == (1, 512.0)


def test_with_delay_unscale_gradients_stay_scaled_until_the_last_block() -> None:
    training = Training(started())
    training.backward(delay_unscale=True)
    assert training.grad == 1024.0
    training.backward(2.0)
    assert training.grad == 3.0
    training.optimizer.step()
    assert training.weight == 1.0 - 0.5 * 3.0


def test_automatic_scaling_accumulates_without_blocks() -> None:
    handle = started(scope="modules")
    handle.auto_scale()
    training = Training(handle)
    for _ in range(2):
        training.loss().backward()
    assert training.grad == 2.0
