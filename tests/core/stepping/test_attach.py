"""A step in place of an optimizer's own: attached, detached, copied; names of parameters."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Linear, Parameter

import autoamp
from autoamp.core.attach import AttachedMethod, is_optimizer, named_params, stepped_params
from autoamp.errors import UsageError


class Plain:
    """An optimizer of no class of torch."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [Parameter(torch.ones(2))]}]
        self.calls: list[tuple[Any, ...]] = []

    def step(self, closure: Any = None) -> str:
        self.calls.append((closure,))
        return "stepped"


class Forwarding:
    """Has its step from ``__getattr__``."""

    def __init__(self, inner: Plain) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class Slotted:
    """Takes no attributes."""

    __slots__ = ("__weakref__", "param_groups")

    def __init__(self) -> None:
        self.param_groups: list[Any] = []

    def step(self) -> None:
        """Do nothing."""


def through(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return "guarded", original(*args, **kwargs)


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([Parameter(torch.ones(2))], lr=0.1)


def test_a_step_that_getattr_gives() -> None:
    optimizer = Forwarding(Plain())
    attached = AttachedMethod(optimizer, "step", through)
    assert optimizer.step() == ("guarded", "stepped")
    attached.detach()
    assert optimizer.step() == "stepped"


def test_it_looks_like_the_method() -> None:
    optimizer = sgd()
    before = inspect.signature(optimizer.step)
    AttachedMethod(optimizer, "step", through)
    assert inspect.signature(optimizer.step) == before
    assert optimizer.step.__name__ == "step"
    assert optimizer.step.__self__ is optimizer
    assert optimizer.step.__func__(optimizer) == ("guarded", None)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@pytest.mark.parametrize("make", [Plain, sgd])
def test_a_copy_is_not_guarded(make: Callable[[], Any], copied: Callable[[Any], Any]) -> None:
    optimizer = make()
    AttachedMethod(optimizer, "step", through)
    clone = copied(optimizer)
    assert "step" not in vars(clone) or make is Plain
    assert clone.step() == (None if make is sgd else "stepped")


@pytest.mark.parametrize("thing", [object(), Linear(1, 1), Slotted()])
def test_what_cannot_be_guarded_is_named(thing: Any) -> None:
    with pytest.raises(UsageError, match=type(thing).__name__):
        AttachedMethod(thing, "step", through)


class Net(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = Linear(2, 3)
        self.body = torch.nn.Sequential(Linear(3, 1, bias=False))


class HalfBuilt(torch.nn.Module):
    """Answers nothing."""

    def __init__(self) -> None:
        pass


def test_names_come_from_live_modules() -> None:
    half_built = HalfBuilt()
    net, loose = Net(), Parameter(torch.zeros(64, 32))
    optimizer = torch.optim.SGD([{"params": net.parameters()}, {"params": [loose]}])
    names = [name for name, _ in named_params(optimizer)]
    place = "param_groups[1]['params'][0] of shape (64, 32)"
    assert names == ["Net.layer1.weight", "Net.layer1.bias", "Net.body.0.weight", place]
    assert [id(param) for _, param in named_params(optimizer)] == [id(param) for param in stepped_params(optimizer)]
    assert half_built is not None


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_errors_name_parameters_of_the_model_where_masters_are_stepped(opt_level: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autoamp.initialize(model, optimizer, opt_level=opt_level, dtype=torch.float16, device_type="cpu")
    handle = autoamp.current_handle()
    assert handle is not None
    handle.max_consecutive_skips = 1
    with autoamp.scale_loss(model(torch.ones(2, 2)).sum() * float("inf"), optimizer) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(autoamp.NonFiniteGradientsError, match=r"first in Sequential\.0\.weight, Sequential\.0\.bias, "):
        optimizer.step()


def test_names_start_at_the_outermost_module_unless_the_optimizer_was_given_names() -> None:
    net = Net()
    model = torch.nn.Sequential(net)
    found, given = (
        [name for name, _ in named_params(torch.optim.SGD(params))]
        for params in (model.parameters(), net.named_parameters())
    )
    assert found == ["Sequential.0.layer1.weight", "Sequential.0.layer1.bias", "Sequential.0.body.0.weight"]
    assert given == ["layer1.weight", "layer1.bias", "body.0.weight"]


def test_an_optimizer_is_what_has_groups_and_a_step() -> None:
    class Own:
        param_groups: tuple[()] = ()

        def step(self) -> None: ...

    class Broken(Own):
        step = None  # type: ignore[assignment]

    assert is_optimizer(torch.optim.SGD(Net().parameters()))
    assert is_optimizer(Own())
    assert not is_optimizer(Broken())
    assert not is_optimizer(Net())
    assert not is_optimizer(None)
