"""Formulas use torch's fused operators where these compute the same, and only there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp import torch_private
from autoamp.apex.formulas import ADAM, SGD

ADAM_NUMBERS: dict[str, Any] = {
    "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "step": 3, "weight_decay": 0.1, "bias_correction": True,
}  # fmt: skip
SGD_NUMBERS: dict[str, Any] = {
    "lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": False, "decay_after_momentum": False,
}  # fmt: skip
FUSED = ("fused_adam_", "fused_adamw_", "fused_sgd_")


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


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused operators that were called, in order."""
    names: list[str] = []

    def note(name: str, operator: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: (names.append(name), operator(*args, **kwargs))[1]

    for name in FUSED:
        monkeypatch.setattr(torch_private, name, note(name, getattr(torch_private, name)))
    return names


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_by_a_fused_operator_is_that_of_the_formula(decoupled: bool, called: list[str]) -> None:
    fused = lists((3, 4), (5,))
    wide = [[tensor.double() for tensor in tensors] for tensors in fused]
    ADAM.formula(*fused, **ADAM_NUMBERS, decoupled=decoupled)
    assert called == ["fused_adamw_" if decoupled else "fused_adam_"]
    ADAM.formula(*wide, **ADAM_NUMBERS, decoupled=decoupled)
    assert len(called) == 1
    for mine, theirs in zip(fused, wide, strict=True):
        torch.testing.assert_close(mine, theirs, check_dtype=False)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_by_a_fused_operator_is_that_of_the_formula(momentum: float, nesterov: bool, called: list[str]) -> None:
    fused = lists((3, 4), (5,), count=3 if momentum else 2)
    wide = [[tensor.double() for tensor in tensors] for tensors in fused]
    grads = [grad.clone() for grad in fused[1]]
    settings = {**SGD_NUMBERS, "momentum": momentum, "dampening": 0.0 if nesterov else 0.1, "nesterov": nesterov}
    SGD.formula(*fused, **settings)
    SGD.formula(*wide, **settings)
    assert called == ["fused_sgd_"]
    for mine, theirs in zip(fused, wide, strict=True):
        torch.testing.assert_close(mine, theirs, check_dtype=False)
    assert all(map(torch.equal, fused[1], grads))


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", range(3))
def test_fused_operators_are_not_given_what_they_would_get_wrong(odd: str, place: int, called: list[str]) -> None:
    some = lists((3, 4), (2, 2))
    some[place][1] = ODD[odd](some[place][1])
    # Nor do the multi-tensor functions take all of these.
    with contextlib.suppress(RuntimeError):
        ADAM.formula(*some, **ADAM_NUMBERS, decoupled=True)
    with contextlib.suppress(RuntimeError):
        SGD.formula(*some[:3], **SGD_NUMBERS)
    assert called == []


@pytest.mark.parametrize("options", [{"bias_correction": False}, {"eps_inside_sqrt": True}], ids=str)
def test_fused_adam_is_not_called_for_what_it_does_not_compute(options: dict[str, Any], called: list[str]) -> None:
    ADAM.formula(*lists((3, 4)), **{**ADAM_NUMBERS, **options}, decoupled=True)
    assert called == []


@pytest.mark.parametrize("options", [{"first": True}, {"decay_after_momentum": True}], ids=str)
def test_fused_sgd_is_not_called_for_what_it_does_not_compute(options: dict[str, Any], called: list[str]) -> None:
    SGD.formula(*lists((3, 4), count=3), **{**SGD_NUMBERS, **options})
    assert called == []
