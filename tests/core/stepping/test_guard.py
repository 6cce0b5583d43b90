"""What the step of a guarded optimizer does after blocks of a scaled loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from autoamp.core import DynamicLossScaler
from autoamp.errors import UsageError
from tests.core.stepping.guarded import Setup, guard_of, scale_loss

pytestmark = pytest.mark.filterwarnings("error")


# -- one block, one step --


def test_overflowed_tells_of_a_skip_before_the_step(reads: list[int]) -> None:
    setup = Setup()
    assert not setup.guard.grads.overflowed()
    setup.backward()
    assert not setup.guard.grads.overflowed()
    setup.backward(math.inf)
    assert setup.guard.grads.overflowed()
    assert (setup.scaler.loss_scale, setup.scaler.unskipped) == (1024.0, 0)
    setup.optimizer.step()
    assert reads == [1, 1]
    assert setup.guard.grads.overflowed()
    assert setup.scaler.loss_scale == 512.0


def test_a_step_of_several_blocks_is_one_reading(reads: list[int], passes: list[str]) -> None:
    setup = Setup()
    for _ in range(2):
        for count in range(3):
            setup.backward(0.25)
            assert passes.count("unscale_") == count + 1
        assert reads == []
        setup.optimizer.step()
        assert len(reads) == 1
        reads.clear()
        passes.clear()
        setup.optimizer.zero_grad(set_to_none=False)
    assert setup.param.tolist() == [1.0 - 2 * 0.375] * 2
    assert setup.scaler.unskipped == 2


def test_a_step_inside_the_block_is_refused() -> None:
    setup = Setup()
    with scale_loss(setup.param.sum(), setup.guard, setup.scaler) as scaled:
        scaled.backward()
        with pytest.raises(UsageError, match=r"scale 1024 and checked; move optimizer\.step\(\) after the with block"):
            setup.optimizer.step()
    assert setup.guard.history.steps == 0
    setup.optimizer.step()
    assert setup.param.tolist() == [0.5, 0.5]


# -- several blocks a step. More of them, at random: tests/property --


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_dropped_gradients_update_the_scaler_and_skip_no_step(factor: float) -> None:
    setup = Setup()
    setup.backward(factor)
    setup.optimizer.zero_grad()
    with scale_loss(setup.param.sum(), setup.guard, setup.scaler) as scaled:
        # The scaler was updated before the block began.
        assert scaled.item() == (2048.0 if factor == 1.0 else 1024.0)
        scaled.backward()
    setup.optimizer.step()
    assert setup.param.tolist() == [0.5, 0.5]
    assert setup.guard.history.total == 0
    assert setup.scaler.unskipped == (2 if factor == 1.0 else 1)


# -- delay_unscale --


def test_delayed_gradients_that_were_dropped_leave_no_scale() -> None:
    setup = Setup()
    setup.backward(1.0, delay_unscale=True)
    setup.optimizer.zero_grad()
    setup.optimizer.step()
    assert setup.guard.grads.scale == 1.0
    setup.backward(1.0, delay_unscale=True)
    setup.param.grad = None
    with scale_loss(setup.param.sum(), setup.guard, setup.scaler) as scaled:
        assert setup.guard.grads.scale == 1024.0
        scaled.backward()
    assert setup.grad == [1.0, 1.0]


@pytest.mark.parametrize("factor", [0.5, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_delayed_gradients_that_were_replaced_have_their_scale_still(dtype: torch.dtype, factor: float) -> None:
    def halve() -> None:
        assert setup.param.grad is not None
        setup.param.grad = setup.param.grad * 0.5

    setup = Setup(dtype=dtype)
    setup.backward(factor, delay_unscale=True)
    halve()
    setup.optimizer.step()
    assert setup.param.tolist() == ([0.875] * 2 if factor == 0.5 else [1.0] * 2)
    assert setup.scaler.loss_scale == (1024.0 if factor == 0.5 else 512.0)
    assert setup.guard.grads.scale == 1.0
    setup.optimizer.zero_grad()
    setup.backward(1.0, delay_unscale=True)
    halve()
    setup.backward(0.5)
    assert setup.grad == [1.0, 1.0]


def test_delayed_gradients_of_which_one_was_dropped_are_unscaled() -> None:
    setup, other = Setup(), Parameter(torch.ones(2))
    setup.optimizer.add_param_group({"params": [other]})
    with scale_loss((setup.param + other).sum(), setup.guard, setup.scaler, delay_unscale=True) as scaled:
        scaled.backward()
    other.grad = None
    setup.optimizer.step()
    assert (setup.param.tolist(), other.tolist()) == ([0.5, 0.5], [1.0, 1.0])


# -- several ranks --


def test_inf_that_a_reduction_brings_after_a_block_skips_the_step(fake_ranks: Callable[[int], None]) -> None:
    fake_ranks(2)
    setup, others = Setup(), [DynamicLossScaler(8.0), DynamicLossScaler(16.0)]
    setup.backward(1.0)
    for other in others:
        with scale_loss(setup.param.sum(), setup.guard, other) as scaled:
            scaled.backward()
    assert setup.param.grad is not None
    setup.param.grad[0] = math.inf
    setup.optimizer.step()
    assert setup.param.tolist() == [1.0, 1.0]
    assert setup.guard.history.total == 1
    # The scaler of the last block is to blame.
    assert [scaler.loss_scale for scaler in (setup.scaler, *others)] == [1024.0, 8.0, 8.0]


# -- install, uninstall, lifetime --


def test_an_uninstalled_guard_restores_the_step_and_unscales() -> None:
    setup = Setup()
    before = {name: value for name, value in vars(setup.optimizer).items() if name != "step"}
    assert "step" in vars(setup.optimizer)
    setup.backward(1.0, delay_unscale=True)
    setup.guard.uninstall()
    setup.guard.uninstall()
    assert vars(setup.optimizer) == before
    assert setup.grad == [1.0, 1.0]
    setup.optimizer.step()
    assert (setup.param.tolist(), setup.guard.history.steps) == ([0.5, 0.5], 0)


# -- other optimizers --


def test_a_step_without_a_signature_is_guarded() -> None:
    class WrittenInC(dict[str, Any]):
        """Its step is a method of C, as those of compiled extensions are."""

        step = dict.clear

        def __init__(self, params: list[Parameter]) -> None:
            super().__init__(kept=1)
            self.param_groups = [{"params": params}]

    param = Parameter(torch.ones(2))
    optimizer = WrittenInC([param])
    guard, scaler = guard_of(optimizer), DynamicLossScaler(1024.0)
    for factor, left in ((math.inf, {"kept": 1}), (1.0, {})):
        param.grad = None
        with scale_loss((param * factor).sum(), guard, scaler) as scaled:
            scaled.backward()
        optimizer.step()
        assert optimizer == left


@pytest.mark.parametrize("when", ["before the step", "before the next block"])
@pytest.mark.parametrize("factor", [1.0, math.inf])
@pytest.mark.parametrize("delay", [False, True])
def test_gradients_of_parameters_added_after_a_block_are_unscaled_and_checked(
    when: str, factor: float, delay: bool
) -> None:
    setup, late = Setup(), Parameter(torch.ones(2))

    def backward(factor: float) -> None:
        with scale_loss((setup.param + late * factor).sum(), setup.guard, setup.scaler, delay) as scaled:
            scaled.backward()

    # A step before, whose block knows the optimizer without them.
    setup.backward(0.0)
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    backward(factor)
    setup.optimizer.add_param_group({"params": [late]})
    if when == "before the next block":
        backward(1.0)
    setup.optimizer.step()
    assert setup.guard.history.step.skipped is (factor != 1.0)
    steps = 0.0 if factor != 1.0 else 2.0 if when == "before the next block" else 1.0
    assert late.tolist() == setup.param.tolist() == [1.0 - 0.5 * steps] * 2


def test_under_a_scheduler_an_uninstalled_guard_lets_calls_pass() -> None:
    setup = Setup()
    torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.5)
    wrapper = setup.optimizer.step
    setup.backward(math.inf)
    setup.guard.uninstall()
    assert setup.optimizer.step is wrapper
    setup.param.grad = torch.ones(2)
    setup.optimizer.step()
    assert setup.param.tolist() == [0.5, 0.5]


# -- what is logged --


def test_skips_are_logged_at_powers_of_two(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup()
    with caplog.at_level(logging.WARNING, "autoamp.core"):
        for _ in range(9):
            setup.optimizer.zero_grad()
            setup.backward(math.inf)
            setup.optimizer.step()
    assert len(caplog.records) == 4
    assert "loss scale 1024, the next is 512 (skipped 1, in a row 1)" in caplog.text
    assert "skipped 8, in a row 8" in caplog.text
