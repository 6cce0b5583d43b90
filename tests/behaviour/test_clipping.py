"""docs/howto/clipping.md: gradient clipping."""

from __future__ import annotations

import pytest
import torch

import autoamp
from tests.behaviour.training import OVERFLOW, Training, started


def test_the_handle_clips_true_gradients_after_the_block() -> None:
    training = Training(started())
    training.backward(3.0)
    assert float(training.handle.clip_grad_norm_(training.optimizer, max_norm=1.0)) == 6.0
    assert training.grad == pytest.approx(0.5)


def test_torchs_own_clipping_works_too() -> None:
    training = Training(started())
    training.backward(3.0)
    norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.optimizer.step()
    assert (float(norm), training.weight) == (6.0, pytest.approx(1.0 - 0.5 * 0.5))


def test_gradients_that_overflowed_are_not_clipped_and_the_step_is_skipped() -> None:
    training = Training(started())
    training.backward(OVERFLOW)
    norm = training.handle.clip_grad_norm_(training.optimizer, max_norm=1.0)
    training.optimizer.step()
    assert not norm.isfinite()
    assert (training.weight, training.handle.skipped_steps) == (1.0, 1)


def test_gradients_whose_norm_is_too_large_for_fp32_are_clipped_to_zero_as_in_torch() -> None:
    training = Training(started())
    training.backward(3.0)
    weight = training.model.weight
    weight.grad = torch.full_like(weight, 1e25)
    assert float(training.handle.clip_grad_norm_(training.optimizer, max_norm=1.0)) == torch.inf
    training.optimizer.step()
    assert (training.weight, training.grad, training.handle.skipped_steps) == (1.0, 0.0, 0)


def test_clipping_inside_the_block_is_an_error_and_torchs_a_warning() -> None:
    training = Training(started())
    loss = training.loss()
    with training.handle.scale_loss(loss, training.optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(autoamp.UsageError, match="cannot be clipped inside its scale_loss block"):
            training.handle.clip_grad_norm_(training.optimizer, max_norm=1.0)
        with pytest.warns(UserWarning, match="was called inside the scale_loss block"):
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1e9)


def test_at_O2_the_gradients_of_the_masters_are_clipped() -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = autoamp.initialize(model, optimizer, opt_level="O2", device_type="cpu", loss_scale=128.0)
    with autoamp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    masters = list(autoamp.master_params(optimizer))
    assert float(torch.nn.utils.clip_grad_norm_(masters, max_norm=1.0)) == 2.0
    before = masters[0].detach().clone()
    optimizer.step()
    assert torch.allclose(before - masters[0].detach(), torch.full((1, 4), 0.5))
