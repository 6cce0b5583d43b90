"""What a backward pass reaches, and gradients on their way to its scale and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoamp.backward_passes import ScaledPass, can_begin_at, largest_scale, listed, reached_by, scaled_gradients
from autoamp.scaling import StaticLossScaler
from autoamp.stepping import StepGuard


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


def test_one_or_several_tensors_as_a_list() -> None:
    x = torch.ones(2)
    assert listed(None) == []
    assert listed(x)[0] is x
    assert len(listed((x, x))) == 2


def test_gradients_that_were_there_are_added_to_in_true_units() -> None:
    layer = nn.Linear(1, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    guard = StepGuard(optimizer)
    guard.install()
    layer.bias.grad = kept = torch.tensor([1.0, 2.0])
    scaled = ScaledPass(StaticLossScaler(8.0), {id(layer.bias): [guard]}, (), math.inf)
    scaled.take([layer.bias], set())
    assert scaled.scale == 8.0
    assert torch.equal(kept, torch.tensor([8.0, 16.0]))
    kept += 8.0
    scaled.close()
    assert layer.bias.grad is kept
    assert torch.equal(kept, torch.tensor([2.0, 3.0]))
    assert len(guard.pending) == 1
    # What was closed is not unscaled again.
    scaled.close()
    assert torch.equal(kept, torch.tensor([2.0, 3.0]))


def test_half_gradients_that_were_there_are_put_aside() -> None:
    weight = torch.zeros(2, dtype=torch.float16, requires_grad=True)
    before: Tensor = torch.full((2,), 100.0, dtype=torch.float16)
    weight.grad = before
    scaled = ScaledPass(StaticLossScaler(2.0**12), {}, (), math.inf)
    scaled.take([weight], set())
    assert weight.grad is None
    weight.grad = torch.full((2,), 2.0**12, dtype=torch.float16)
    scaled.close()
    assert weight.grad is before
    assert torch.equal(before, torch.full((2,), 101.0, dtype=torch.float16))
