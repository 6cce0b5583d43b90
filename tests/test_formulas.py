"""Steps by torch's fused operators: what the formulas say, and nothing where the operators would get it wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp import torch_private
from autoamp.formulas import adam_updates, average_, corrections, fused_adam_, fused_sgd_

ADAM: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "step": 3, "decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "decay": 0.1}


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
    assert fused_adam_(*fused, **ADAM, decoupled=decoupled)
    if not decoupled:
        grads = [grad + 0.1 * value for grad, value in zip(grads, values, strict=True)]
    average_(grads, firsts, seconds, 0.9, 1.0 - 0.9, 0.99)
    updates = adam_updates(firsts, seconds, corrections(0.9, 0.99, 3, True), 1e-3, eps_inside_sqrt=False)
    if decoupled:
        updates = [update + 0.1 * value for update, value in zip(updates, values, strict=True)]
    values = [value - 0.1 * update for value, update in zip(values, updates, strict=True)]
    for mine, theirs in zip((values, firsts, seconds), (fused[0], *fused[2:]), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_fused_sgd_is_that_of_the_formulas(momentum: float, nesterov: bool) -> None:
    values, grads, velocities = lists((3, 4), (5,), count=3)
    fused = copied([values, grads, velocities])
    settings = {**SGD, "momentum": momentum, "dampening": 0.0 if nesterov else 0.1}
    assert fused_sgd_(*fused, **settings, nesterov=nesterov)
    for value, grad, velocity, stepped, kept, moved in zip(values, grads, velocities, *fused, strict=True):
        decayed = grad + 0.1 * value
        going = momentum * velocity + (1.0 - settings["dampening"]) * decayed
        update = decayed + momentum * going if nesterov else going if momentum else decayed
        torch.testing.assert_close(stepped, value - 0.1 * update)
        torch.testing.assert_close(moved, going if momentum else velocity)
        assert torch.equal(kept, grad)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", range(3))
def test_fused_operators_refuse_what_they_would_get_wrong(odd: str, place: int) -> None:
    some = lists((3, 4), (2, 2))
    some[place][1] = ODD[odd](some[place][1])
    before = [tensors[0].clone() for tensors in some]
    assert not fused_adam_(*some, **ADAM, decoupled=True)
    assert not fused_sgd_(*some[:3], **SGD, nesterov=False)
    assert all(torch.equal(tensors[0], one) for tensors, one in zip(some, before, strict=True))


def test_fused_operators_have_nothing_to_do_without_tensors() -> None:
    assert not fused_adam_([], [], [], [], **ADAM, decoupled=True)
    assert not fused_sgd_([], [], [], **SGD, nesterov=False)


def test_fused_operators_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FUSED_ADAM", "FUSED_ADAMW", "FUSED_SGD"):
        monkeypatch.setattr(torch_private, name, None)
    some = lists((3, 4))
    assert not fused_adam_(*some, **ADAM, decoupled=True)
    assert not fused_adam_(*some, **ADAM, decoupled=False)
    assert not fused_sgd_(*some[:3], **SGD, nesterov=False)
