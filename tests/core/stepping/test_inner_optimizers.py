"""Optimizers that step by others of their own, at O2: trained, or refused before anything changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autoamp


class Outer(torch.optim.Optimizer):
    """Has lists of its own of the parameters that the inner optimizers step."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        super().__init__([param for one in self.all for group in one.param_groups for param in group["params"]], {})

    @property
    def all(self) -> list[Any]:
        """The inner optimizers."""
        kind = type(self.inner)
        return list(self.inner.values() if kind is dict else self.inner if kind in (list, tuple) else [self.inner])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.all:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.all:
            one.zero_grad(set_to_none)


class SharesGroups(Outer):
    """Has the groups of the inner optimizers themselves."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.param_groups = [group for one in self.all for group in one.param_groups]


def built(kind: type[Outer], held: str, model: nn.Sequential) -> Outer:
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(model[1].parameters(), lr=0.01)
    both = torch.optim.SGD(model.parameters(), lr=0.1)
    return kind({"alone": both, "list": [first, second], "tuple": (first, second), "dict": {1: first, 2: second}}[held])


def trains(model: nn.Module, step_by: Any, optimizer: Any) -> list[bool]:
    before = [param.detach().float().clone() for param in model.parameters()]
    for seed in range(3):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        with autoamp.scale_loss(mse_loss(model(x).float(), x.sum(1, keepdim=True)), step_by) as scaled:
            scaled.backward()
        optimizer.step()
    return [not torch.equal(param.float(), old) for param, old in zip(model.parameters(), before, strict=True)]


@pytest.mark.parametrize("held", ["alone", "list", "tuple", "dict"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [Outer, SharesGroups])
def test_an_optimizer_that_steps_by_others_trains_or_is_refused_with_a_remedy(
    kind: type[Outer], level: str, held: str
) -> None:
    """Masters took the places of half parameters in the outer lists alone: the model was silently not trained."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = built(kind, held, model)
    options: Any = {"opt_level": level, "dtype": torch.float16, "loss_scale": 128.0, "verbosity": 0}
    if level == "O2" and kind is Outer:
        with pytest.raises(autoamp.UsageError, match=r"whose lists of parameters .* in \.inner$"):
            autoamp.initialize(model, optimizer, **options)
        assert model[0].weight.dtype is torch.float32
        # As the message says.
        autoamp.initialize(model, **options)
        optimizer = built(kind, held, model)
        assert trains(model, optimizer.all, optimizer) == [True] * 4
    else:
        autoamp.initialize(model, optimizer, **options)
        assert trains(model, optimizer, optimizer) == [True] * 4


def initialized(model: nn.Module, optimizers: Any, **options: Any) -> None:
    options = {"dtype": torch.float16, "device_type": "cpu", "verbosity": 0, **options}
    autoamp.initialize(model, optimizers, opt_level="O2", **options)


def test_an_inner_optimizer_that_is_given_too_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = Outer(inner)
    initialized(model, [outer, inner])
    assert all(trains(model, outer, outer))


@pytest.mark.parametrize("kind", ["norms", "fp64", "left in fp32", "of another model"])
def test_an_outer_optimizer_without_half_parameters_trains(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = model.double() if kind == "fp64" else model
    first, last = list(model.parameters())[:2], list(model.parameters())[2:4] if kind == "norms" else None
    outer = Outer(torch.optim.SGD(last or model[2].parameters(), lr=0.1))
    optimizers = [torch.optim.SGD(first, lr=0.1), outer]
    options = {"cast_model_type": False if kind == "left in fp32" else None, "loss_scale": 128.0}
    initialized(model[0] if kind == "of another model" else model, optimizers, **options)
    before = [param.detach().clone() for param in outer.param_groups[0]["params"]]
    inputs = torch.randn(8, 4, dtype=next(model.parameters()).dtype if kind == "fp64" else torch.float32)
    with autoamp.scale_loss(model(inputs).square().sum(), optimizers) as scaled:
        scaled.backward()
    outer.step()
    assert not any(map(torch.equal, before, outer.param_groups[0]["params"]))


def test_norms_that_are_cast_are_half_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(autoamp.UsageError, match="an optimizer of its own"):
        initialized(model, Outer(torch.optim.SGD(model[1].parameters(), lr=0.1)), keep_batchnorm_fp32=False)
    assert model[1].weight.dtype is torch.float32


class Unready:
    def __getattr__(self, name: str) -> Any:
        raise ImportError(name)


@pytest.mark.parametrize("kind", ["unready", "in a list", "no groups"])
def test_what_an_optimizer_keeps_may_answer_badly(kind: str) -> None:
    no_groups = SimpleNamespace(param_groups=None, step=print)
    kept = {"unready": Unready(), "in a list": [Unready()], "no groups": no_groups}[kind]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.kept = kept
    initialized(model, optimizer)
    assert all(trains(model, optimizer, optimizer))
