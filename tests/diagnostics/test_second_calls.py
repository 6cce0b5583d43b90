"""A model is not called a second time if its code writes to what cannot be put back."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoamp.diagnostics.second_calls import why_not_again

CACHE: dict[str, Any] = {}
COUNT = itertools.count()


def remember(x: Tensor) -> None:
    CACHE.setdefault("x", x)


class OfTheClass(nn.Module):
    calls = 0
    seen: list[int] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        OfTheClass.calls += 1
        return x


class OfItsType(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        type(self).calls = 1  # type: ignore[assignment]
        return x


class ListOfTheClass(OfTheClass):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return x


class OfAGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        CACHE["x"] = x
        return x


class OfAFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        remember(x)
        return x


class OfADefault(nn.Module):
    def forward(self, x: Tensor, log: list[int] = []) -> Tensor:  # noqa: B006
        log.append(1)
        return x


class OfAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.options = object()

    def forward(self, x: Tensor) -> Tensor:
        self.options.count = 1  # type: ignore[attr-defined]
        return x


class OfACounter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * next(COUNT)


class ToTheTerminal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print(x.shape)
        return x


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


@pytest.mark.parametrize(
    "kind",
    [OfTheClass, OfItsType, ListOfTheClass, OfAGlobal, OfAFunction, OfADefault, OfAnObject, OfACounter, ToTheTerminal],
)
def test_what_cannot_be_put_back_is_a_reason(kind: type[nn.Module]) -> None:
    assert "not called again" in str(why_not_again(nn.Sequential(nn.Linear(2, 2), kind())))


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
