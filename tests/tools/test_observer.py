"""Observers: what they are told, that several may look on, that nobody pays while none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoamp
from autoamp.tools import Call, Observer


class Notes(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.over = 0

    def before(self, call: Call) -> Any:
        # Neither cast nor told of.
        assert F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32
        return call.op.name, call.casting, None if call.outer is None else call.outer.op.name

    def after(self, call: Call, state: Any, result: Any) -> None:
        self.told.append((*state, result.dtype))

    def failed(self, call: Call, state: Any, error: BaseException) -> None:
        self.told.append((*state, type(error)))

    def ended(self) -> None:
        self.over += 1


@pytest.fixture
def handle(short_lists: autoamp.Handle) -> autoamp.Handle:
    return short_lists


def test_off_the_same_functions_are_installed(handle: autoamp.Handle) -> None:
    names = [(torch.nn.functional, "linear"), (torch.nn.functional, "softmax"), (torch, "exp"), (nn.Module, "__call__")]
    before = [vars(owner)[name].__code__ for owner, name in names]
    one, other = Notes(), Notes()
    first = handle.observe(one)
    within = [vars(owner)[name] for owner, name in names]
    assert all(function.__code__ is not code for function, code in zip(within, before, strict=True))
    second = handle.observe(other)
    first.stop()
    # The second still looks on, and needed no patches of its own.
    assert [vars(owner)[name] for owner, name in names] == within
    second.stop()
    second.stop()
    assert [vars(owner)[name].__code__ for owner, name in names] == before
    assert (one.over, other.over) == (1, 1)


def test_it_is_told_of_calls_and_of_their_errors(handle: autoamp.Handle) -> None:
    notes, x = Notes(), torch.ones(1, 2)
    with handle.observe(notes):
        F.softmax(x, -1)
        with handle.disable_casts(), pytest.raises(RuntimeError):
            F.linear(x, torch.ones(3, 3))
    softmax = "torch.nn.functional.softmax"
    assert notes.told == [
        ("torch.Tensor.softmax", False, softmax, torch.float32),
        (softmax, True, None, torch.float32),
        ("torch.nn.functional.linear", False, None, RuntimeError),
    ]


def test_it_ends_with_the_handle(handle: autoamp.Handle) -> None:
    notes = Notes()
    watch = handle.observe(notes)
    handle.deactivate()
    watch.stop()
    assert notes.over == 1
    with pytest.raises(autoamp.UsageError, match="not active"):
        handle.observe(Notes())


def test_only_observers_are_taken(handle: autoamp.Handle) -> None:
    with pytest.raises(autoamp.UsageError, match="not a list"):
        handle.observe([])  # type: ignore[arg-type]
    torch.exp(torch.ones(1))
