"""Closures under `auto_scale()`: they run when the optimizer calls them, and an overflow ends the step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autoamp

# Times a scale of 2**16 this leaves fp32's range; times 2**15 it does not.
EDGE = 2.0**112


@pytest.fixture
def handle() -> autoamp.Handle:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, lists={"extends": []})
    handle.auto_scale()
    return handle


class Program:
    """One parameter, and a closure whose gradients are the factors that are given, one for each call."""

    def __init__(self, *factors: float, dtype: torch.dtype = torch.float32) -> None:
        self.param = torch.ones(1, requires_grad=True)
        self.factors = list(factors)
        self.dtype = dtype
        self.calls = 0

    def closure(self) -> Tensor:
        self.param.grad = None
        loss = (self.param.to(self.dtype) * self.factors[min(self.calls, len(self.factors) - 1)]).sum()
        self.calls += 1
        loss.backward()
        return loss.detach()


def test_an_overflow_ends_the_step_and_changes_nothing(handle: autoamp.Handle) -> None:
    program = Program(0.5, EDGE, 0.5)
    optimizer = torch.optim.Adam([program.param], lr=0.5)
    optimizer.step(program.closure)
    before, state = program.param.detach().clone(), copy.deepcopy(optimizer.state[program.param])
    assert float(optimizer.step(program.closure)) == float(before) * EDGE
    assert torch.equal(program.param, before)
    assert all(torch.equal(optimizer.state[program.param][name], value) for name, value in state.items())
    assert program.param.grad is not None
    assert float(program.param.grad) == 0.0
    assert (handle.skipped_steps, handle.last_step_skipped, handle.loss_scale) == (1, True, 2.0**15)
    optimizer.step(program.closure)
    assert program.calls == 3
    assert not torch.equal(program.param, before)


class Twice(torch.optim.SGD):
    """Asks twice before it moves."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        closure()
        return super().step(closure)


@pytest.mark.parametrize("make", [lambda params: torch.optim.LBFGS(params, lr=1.0, max_iter=2), Twice])
def test_a_later_evaluation_that_overflows_is_repeated(handle: autoamp.Handle, make: Any) -> None:
    program = Program(1.0, EDGE, EDGE, 1.0)
    optimizer = make([program.param])
    optimizer.step(program.closure)
    # The optimizer asked twice.
    assert program.calls == 3
    assert (handle.skipped_steps, handle.loss_scale) == (0, 2.0**15)


def test_a_half_loss_whose_scale_is_below_the_scalers_is_evaluated_again(handle: autoamp.Handle) -> None:
    """A pass that begins at an fp16 tensor is scaled by 2**15 at most: one backoff from 2**16 lowers it by nothing."""
    program = Program(1.0, 3.0, dtype=torch.float16)
    optimizer = torch.optim.LBFGS([program.param], lr=1.0, max_iter=2)
    optimizer.step(program.closure)
    assert program.param.grad is not None
    assert float(program.param.grad) == 3.0
    assert (handle.skipped_steps, handle.loss_scale) == (0, 2.0**14)


@pytest.mark.parametrize("factor", [EDGE, float("inf"), float("nan")])
def test_a_later_evaluation_for_which_no_scale_helps_is_an_error(factor: float) -> None:
    """An optimizer would take the 0 in place of its gradient for a minimum."""
    settings: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16, "lists": {"extends": []}}
    autoamp.init(**settings, loss_scale=2.0**16).auto_scale()
    program = Program(1.0, factor)
    optimizer = torch.optim.LBFGS([program.param], lr=1.0, max_iter=3)
    with pytest.raises(autoamp.NonFiniteGradientsError, match="LBFGS called its closure in the middle of a step"):
        optimizer.step(program.closure)
    assert program.calls == 2


def test_a_frozen_parameter_may_be_an_inference_tensor(handle: autoamp.Handle) -> None:
    """Torch counts no writes into it."""
    program = Program(0.5)
    with torch.inference_mode():
        frozen = torch.ones(1)
    optimizer = torch.optim.SGD([program.param, frozen], lr=0.5)
    optimizer.step(program.closure)
    assert (program.param.item(), program.calls) == (0.75, 1)


def test_what_a_closure_raises_comes_out(handle: autoamp.Handle) -> None:
    param = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=0.5)

    def closure() -> Tensor:
        raise StopIteration

    with pytest.raises(StopIteration):
        optimizer.step(closure)
    program = Program(0.5)
    optimizer.add_param_group({"params": [program.param]})
    optimizer.step(program.closure)
    assert program.param.item() == 0.75


def test_skips_in_a_row_are_counted_over_closures(handle: autoamp.Handle) -> None:
    handle.max_consecutive_skips = 3
    program = Program(float("inf"))
    optimizer = torch.optim.SGD([program.param], lr=0.5)
    optimizer.step(program.closure)
    optimizer.step(program.closure)
    with pytest.raises(autoamp.NonFiniteGradientsError, match=r"3 steps of SGD in a row .* first in param_groups\[0\]"):
        optimizer.step(program.closure)
    assert program.param.item() == 1.0
    assert program.calls == 3
