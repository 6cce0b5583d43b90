"""What a backward pass reaches, and gradients as they arrive."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoamp.auto_scaling.backward_pass import (
    ScaledPass,
    can_begin_at,
    largest_scale,
    reached_by,
    scaled_gradients,
)
from autoamp.scaling.loss_scale import DynamicLossScaler, LossScaler, StaticLossScaler
from autoamp.stepping import StepGuard, read_checks
from tests.stepping.guarded import Owner


def test_reached_are_leaves_or_the_inputs() -> None:
    x, weight, frozen = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2)
    hidden = x * weight + frozen
    leaves, nodes = reached_by([(hidden * x).sum(), weight], None)
    assert {id(leaf) for leaf in leaves} == {id(x), id(weight)}
    assert hidden.grad_fn in nodes
    leaves, _ = reached_by([hidden.sum()], [x])
    assert len(leaves) == 1
    assert leaves[0] is x


def test_a_deep_graph_is_walked_without_recursion() -> None:
    x = value = torch.ones((), requires_grad=True)
    for _ in range(5000):
        value = value + 1
    leaves, nodes = reached_by([value], None)
    assert len(leaves) == 1
    assert leaves[0] is x
    assert len(nodes) == 5001


@pytest.mark.parametrize(
    ("root", "gradient", "can"),
    [
        (torch.ones((), requires_grad=True), None, True),
        (torch.ones(1, requires_grad=True), None, True),
        (torch.ones(2, requires_grad=True), None, False),
        (torch.ones(2, requires_grad=True), torch.ones(2), True),
        (torch.ones(2, requires_grad=True), torch.ones(3), False),
        (torch.ones(()), None, False),
        (torch.ones((), dtype=torch.complex64, requires_grad=True), None, False),
        ("loss", None, False),
    ],
)
def test_where_a_pass_can_begin(root: Any, gradient: Any, can: bool) -> None:
    assert can_begin_at(root, gradient) is can


def test_gradients_of_roots() -> None:
    roots = [torch.ones((), requires_grad=True), torch.ones(2, requires_grad=True)]
    one, other = scaled_gradients(roots, [None, torch.full((2,), 3.0)], 4.0)
    assert float(one) == 4.0
    assert torch.equal(other, torch.full((2,), 12.0))
    assert not one.requires_grad
    assert [float(gradient.sum()) for gradient in scaled_gradients(roots[:1], [], 8.0)] == [8.0]
    assert largest_scale(roots) == math.inf
    assert largest_scale([*roots, torch.ones((), dtype=torch.float16)]) == 2.0**15


class Case:
    """Two parameters of one optimizer, and a pass that reaches them."""

    def __init__(self, scaler: LossScaler | None = None, **settings: Any) -> None:
        self.scaler = scaler or StaticLossScaler(8.0)
        self.layer = nn.Linear(1, 2)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=1.0)
        self.guard = StepGuard(self.optimizer, Owner(scalers=[self.scaler]))
        self.owners = {id(param): [self.guard] for param in self.layer.parameters()}
        self.settings = settings
        self.running = self.another()

    def another(self) -> ScaledPass:
        self.running = ScaledPass(self.scaler, self.owners, math.inf, now=lambda: self.running, **self.settings)
        return self.running


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_arrives_gets_its_true_value_and_stays_as_it_was(dtype: torch.dtype) -> None:
    case = Case()
    leaf = torch.zeros(2, dtype=dtype, requires_grad=True)
    case.running.take([leaf], set())
    assert case.running.knows(leaf)
    arriving = torch.tensor([8.0], dtype=dtype).expand(2)
    true = case.running.arrived(leaf, arriving)
    assert torch.equal(true, torch.ones(2, dtype=dtype))
    true.add_(torch.tensor([1.0, 2.0], dtype=dtype))
    assert torch.equal(true, torch.tensor([2.0, 3.0], dtype=dtype))
    assert torch.equal(arriving, torch.full((2,), 8.0, dtype=dtype))


@pytest.mark.parametrize("cleans", [True, False])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_overflow_is_noted_and_replaced_where_nobody_waits_for_it(cleans: bool, value: float) -> None:
    case = Case(cleans=cleans)
    weight, bias = case.layer.weight, case.layer.bias
    case.running.take([weight, bias], set())
    (check,) = case.guard.checks.pending
    true = case.running.arrived(weight, torch.tensor([[1.0], [value]]))
    assert torch.equal(true.isfinite(), torch.tensor([[True], [cleans]]))
    assert torch.equal(case.running.arrived(bias, torch.full((2,), 16.0)), torch.full((2,), 2.0))
    hidden = case.running.still_overflowed(weight, torch.ones(2, 1))
    assert bool(hidden.isfinite().all()) is cleans
    assert torch.equal(case.running.still_overflowed(bias, torch.ones(2)), torch.ones(2))
    assert check.overflowed is None
    read_checks([check])
    assert check.overflowed
    assert [tensor is weight for tensor in check.cleared] == [True] * cleans


def test_gradients_that_are_gone_when_a_pass_begins_were_dropped() -> None:
    case = Case(DynamicLossScaler(8.0))
    params = [case.layer.weight, case.layer.bias]
    case.running.take(params, set())
    case.running.arrived(params[0], torch.full((2, 1), math.inf))
    params[0].grad = torch.zeros(2, 1)
    first = case.guard.checks.pending[0]
    case.another().take(params, set())
    assert first in case.guard.checks.pending
    params[0].grad = None
    case.another().take(params, set())
    assert len(case.guard.checks.pending) == 1
    assert first not in case.guard.checks.pending
    assert case.guard.checks.resolve() is None
    # The scaler hears of it all the same.
    assert case.scaler.loss_scale == 4.0


def test_a_second_check_of_one_pass_counts_only_where_it_overflows() -> None:
    case = Case(DynamicLossScaler(8.0, growth_interval=2))
    weight, bias = case.layer.weight, case.layer.bias
    case.running.take([weight, bias], set())
    case.running.arrived(weight, torch.ones(2, 1))
    assert case.guard.checks.resolve() is None
    assert case.scaler.unskipped == 1
    case.running.arrived(bias, torch.ones(2))
    assert case.guard.checks.resolve() is None
    assert (case.scaler.unskipped, case.scaler.loss_scale) == (1, 8.0)
    case.running.arrived(bias, torch.full((2,), math.nan))
    blamed = case.guard.checks.resolve()
    assert blamed is not None
    assert blamed.scaler.loss_scale == case.scaler.loss_scale == 4.0
    case.running.arrived(bias, torch.ones(2))
    assert case.guard.checks.resolve() is not None
    assert case.scaler.loss_scale == 4.0


def test_leaves_of_passes_within() -> None:
    """Copies of inputs keep the scale; what the program knows gets true gradients."""
    case = Case()
    known = torch.zeros(2, requires_grad=True)
    known.grad = torch.ones(2)
    copied, given_on = (torch.zeros(2, requires_grad=True) for _ in range(2))
    weight, alone = case.layer.weight, nn.Parameter(torch.zeros(2))
    leaves = [copied, given_on, known, weight, alone]
    case.running.take(leaves, set(), within=True)
    assert [case.running.knows(leaf) for leaf in leaves] == [False, False, True, True, True]
    given_on.grad = gradient = torch.full((2,), 8.0)
    case.running.take([given_on], set(), within=True)
    assert not case.running.knows(given_on)
    del copied, leaves
    case.running.close()
    assert torch.equal(given_on.grad, torch.ones(2))
    # It may be part of what goes on in the pass.
    assert torch.equal(gradient, torch.full((2,), 8.0))
    # To the next pass it is known.
    case.another().take([given_on], set(), within=True)
    assert case.running.knows(given_on)


def test_gradients_within_the_graph() -> None:
    case = Case()
    x = torch.ones(2, requires_grad=True)
    hidden: Tensor = x * 2
    hidden.retain_grad()
    hidden.grad = torch.ones(2)
    node: Any = hidden.grad_fn
    case.settings["retained"] = [hidden]
    case.another().take([x], {node})
    hidden.backward(torch.full((2,), 8.0))
    assert torch.equal(hidden.grad, torch.full((2,), 2.0))
    case.running.close()
    assert torch.equal(hidden.grad, torch.full((2,), 2.0))
    # A pass that never came there leaves what was there.
    case.another().take([x], {node})
    assert hidden.grad is None
    case.running.close()
    assert torch.equal(hidden.grad, torch.full((2,), 2.0))
