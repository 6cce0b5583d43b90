"""Steps by torch's fused operators: what the formulas say, and nothing where the operators would get it wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp.apex.formulas import ADAM, SGD

ADAM_NUMBERS: dict[str, Any] = {
    "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "step": 3, "weight_decay": 0.1, "bias_correction": True,
}  # fmt: skip
SGD_NUMBERS: dict[str, Any] = {
    "lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": False, "decay_after_momentum": False,
}  # fmt: skip
fused_adam_, fused_sgd_ = ADAM.fused, SGD.fused
assert fused_adam_ is not None
assert fused_sgd_ is not None


class Own(Tensor):
    pass


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": Tensor.double,
    "half": Tensor.half,
    "strides": lambda tensor: tensor.t().contiguous().t(),
    "device": lambda tensor: tensor.to("meta"),
    "layout": Tensor.to_sparse,
    "type": lambda tensor: tensor.as_subclass(Own),
}


def lists(*shapes: tuple[int, ...], count: int = 4) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.rand(shape, generator=generator) for shape in shapes] for _ in range(count)]


def copied(some: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in some]


@pytest.mark.parametrize("decoupled", [False, True])
def test_fused_adam_is_that_of_the_formulas(decoupled: bool) -> None:
    values, grads, firsts, seconds = lists((3, 4), (5,))
    fused = copied([values, grads, firsts, seconds])
    assert fused_adam_(*fused, **ADAM_NUMBERS, decoupled=decoupled)
    ADAM.formula(values, grads, firsts, seconds, **ADAM_NUMBERS, decoupled=decoupled)
    for mine, theirs in zip((values, firsts, seconds), (fused[0], *fused[2:]), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_fused_sgd_is_that_of_the_formulas(momentum: float, nesterov: bool) -> None:
    lists_in = lists((3, 4), (5,), count=3 if momentum else 2)
    values, grads, *velocities = lists_in
    fused = copied(lists_in)
    settings = {**SGD_NUMBERS, "momentum": momentum, "dampening": 0.0 if nesterov else 0.1, "nesterov": nesterov}
    assert fused_sgd_(*fused, **settings)
    kept = copied([grads])[0]
    SGD.formula(*lists_in, **settings)
    for mine, theirs in zip((values, *velocities), (fused[0], *fused[2:]), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert all(map(torch.equal, fused[1], kept))


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", range(3))
def test_fused_operators_refuse_what_they_would_get_wrong(odd: str, place: int) -> None:
    some = lists((3, 4), (2, 2))
    some[place][1] = ODD[odd](some[place][1])
    before = [tensors[0].clone() for tensors in some]
    assert not fused_adam_(*some, **ADAM_NUMBERS, decoupled=True)
    assert not fused_sgd_(*some[:3], **SGD_NUMBERS)
    assert all(torch.equal(tensors[0], one) for tensors, one in zip(some, before, strict=True))


def test_fused_operators_have_nothing_to_do_without_tensors() -> None:
    assert not fused_adam_([], [], [], [], **ADAM_NUMBERS, decoupled=True)
    assert not fused_sgd_([], [], [], **SGD_NUMBERS)
