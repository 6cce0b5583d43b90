"""A model is not called a second time if its code writes to what cannot be put back."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoamp.diagnostics.second_calls import why_not_again

CACHE: dict[str, Any] = {}
COUNT = itertools.count()


def remember(x: Tensor) -> Tensor:
    CACHE.setdefault("x", x)
    return x


class Calls:
    """Counts calls."""

    count = 0

    def add(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


REMEMBER, ADD = functools.partial(remember), Calls().add


class Model(nn.Module):
    """What the models of a test hold."""

    calls = 0
    seen: list[int] = []  # noqa: RUF012

    def __init__(self, options: Any = None) -> None:
        super().__init__()
        self.options = options

    @property
    def remembered(self) -> Tensor:
        return remember(torch.ones(1))

    def helper(self, x: Tensor) -> Tensor:
        return x


def of_the_class(self: Model, x: Tensor) -> Tensor:
    Model.calls += 1
    return x


def of_its_type(self: Model, x: Tensor) -> Tensor:
    type(self).calls = 1
    return x


def list_of_the_class(self: Model, x: Tensor) -> Tensor:
    self.seen.append(1)
    return x


def of_a_global(self: Model, x: Tensor) -> Tensor:
    CACHE["x"] = x
    return x


def of_a_default(self: Model, x: Tensor, log: list[int] = []) -> Tensor:  # noqa: B006
    log.append(1)
    return x


def of_an_object(self: Model, x: Tensor) -> Tensor:
    self.options.count = 1
    return x


def to_the_terminal(self: Model, x: Tensor) -> Tensor:
    print(x.shape)
    return x


def of_a_variable_around() -> Callable[[Model, Tensor], Tensor]:
    calls = 0

    def forward(self: Model, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x

    return forward


class Printing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print(x.shape)
        return x


OUTSIDE = Printing()

UNSAFE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "class": of_the_class, "its type": of_its_type, "list of the class": list_of_the_class, "global": of_a_global,
    "function": lambda self, x: remember(x), "default": of_a_default, "object": of_an_object,
    "counter": lambda self, x: x * next(COUNT), "terminal": to_the_terminal, "variable around": of_a_variable_around(),
    "property": lambda self, x: x + self.remembered, "bound method": lambda self, x: ADD(x),
    "partial": lambda self, x: REMEMBER(x), "module outside": lambda self, x: OUTSIDE(x),
    "globals": lambda self, x: globals().setdefault("X", x), "inner function": lambda self, x: (lambda: remember(x))(),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSAFE)
def test_what_cannot_be_put_back_is_a_reason(name: str) -> None:
    kind = type("Unsafe", (Model,), {"forward": UNSAFE[name], "__module__": __name__})
    assert "not called again" in str(why_not_again(nn.Sequential(nn.Linear(2, 2), kind(object()))))


def test_each_module_of_a_class_is_looked_at() -> None:
    class Reads(Model):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.options is None else self.options.add(x)

    assert why_not_again(nn.Sequential(Reads(), Reads(), Reads([torch.ones(1), F.relu]))) is None
    for options in (Calls(), [Calls()], [[1]], {"array": numpy.ones(1)}, functools.partial(remember)):
        assert "not called again" in str(why_not_again(nn.Sequential(Reads(), Reads(options))))


class Own(nn.Module):
    """Writes to itself alone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.queue = 0, [torch.zeros(1)]
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.queue.append(x)
        self.mean = 0.9 * self.mean + x.mean()
        return F.relu(torch.cat([x, x]) * random.random())


def test_what_a_module_holds_is_put_back() -> None:
    assert why_not_again(nn.Sequential(nn.Linear(2, 2), Own())) is None


def test_a_function_of_a_name_that_has_no_value_yet_is_read() -> None:
    def module(is_defined: bool) -> nn.Module:
        class Closed(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x if self.training else later(x)

        if is_defined:
            later = remember
        return Closed()

    assert why_not_again(module(False)) is None
    assert "not called again" in str(why_not_again(module(True)))
