"""The names under which lists have what a program called."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoamp.diagnostics.op_names import bare_name, fp32_entry, spelled_at, spellings


class Spelled(TorchFunctionMode):
    """Notes the names of each call that is made of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = spelled_at(bare_name(func), func, sys._getframe(1))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda y: y * y, ("__mul__", "__rmul__")),
        (lambda y: y.mul(y), ("mul", "__mul__", "__rmul__")),
        (lambda y: operator.mul(y, y), ("mul", "__mul__", "__rmul__")),
        (lambda y: torch.mul(y, y), ("mul",)),
        (lambda y: torch.rsub(y, y), ("rsub",)),
        (lambda y: y @ y, ("__matmul__", "__rmatmul__")),
        (lambda y: y.exp(), ("exp",)),
        (lambda y: y[:1], ()),
    ],
)
def test_as_it_was_called(call: Callable[[Tensor], Tensor], names: tuple[str, ...]) -> None:
    with Spelled() as mode:
        call(torch.ones(2))
    assert mode.found == names


def test_bare_names() -> None:
    several = (Tensor.__rtruediv__, Tensor.__itruediv__, Tensor.__rmul__, Tensor.mul_, Tensor.__neg__)
    assert [bare_name(one) for one in several] == ["div", "div", "mul", "mul", "neg"]


def test_all_names() -> None:
    assert spellings("div") == ("div", "divide", "true_divide", "__truediv__", "__rtruediv__")
    assert spellings("exp") == ("exp",)
    assert spellings("no_such_op") == ()
    # A rule on a cast would take away what the program asks for.
    assert spellings("to") == spellings("half") == ()


def test_the_entry_of_an_operator_says_that_the_name_of_the_function_does_not_cover_it() -> None:
    assert fp32_entry(()) is None
    assert str(fp32_entry(("__radd__",))).endswith("; an entry 'add' does not cover the operator")
    assert fp32_entry(("mul", "__mul__")) == 'add fp32 = ["mul", "__mul__"] to the list file'
    assert str(fp32_entry(("mul",), in_place=True)).startswith("write it out of place")
