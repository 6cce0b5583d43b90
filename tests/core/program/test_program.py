"""Torch is patched for the events that somebody hears, once each, and subscribers are told in their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from autoamp.core import PatchSet, Program, Subscriber, listen

HEARD: list[Any] = []


class Named(Subscriber):
    def __init__(self, name: str) -> None:
        self.name = name


class Backward(Named):
    def around_backward(self, backward: Any) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> None:
            HEARD.append(f"{self.name} begins")
            backward(*args, **kwargs)
            HEARD.append(f"{self.name} ends")

        return replacement


class Regions(Named):
    def autocast_entered(self, region: torch.autocast) -> None:
        HEARD.append(self.name)


class Steps(Named):
    def around_step(self, step: Any) -> Any:
        def replacement(optimizer: Any) -> None:
            HEARD.append(self.name)
            step(optimizer)

        return replacement

    def step_ended(self, step: Any) -> None:
        HEARD.append(step)


class Retained(Named):
    is_listening = False

    def grad_retained(self, tensor: Tensor) -> None:
        HEARD.append(self.name)


@pytest.fixture
def patches() -> Iterator[PatchSet]:
    HEARD.clear()
    patches = PatchSet()
    yield patches
    patches.restore()


def patched(patches: PatchSet, *subscribers: Subscriber) -> Program:
    program = Program()
    program.subscribe(*subscribers)
    program.patch(patches, ())
    return program


def names(patches: PatchSet) -> list[str]:
    return [patch.name for patch in patches]


def test_what_nobody_hears_is_not_patched(patches: PatchSet) -> None:
    patched(patches)
    assert names(patches) == []


def test_subscribers_share_one_patch_the_first_is_outermost_and_told_first(patches: PatchSet) -> None:
    original = torch.autograd.backward
    patched(patches, Backward("first"), Backward("second"), Regions("third"), Regions("fourth"))
    assert sorted(names(patches)) == ["autocast.__enter__", "torch.autograd.backward"]
    torch.ones(1, requires_grad=True).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert HEARD == ["first begins", "second begins", "second ends", "first ends", "third", "fourth"]
    patches.restore()
    assert torch.autograd.backward is original


def test_a_subscriber_may_begin_to_listen(patches: PatchSet) -> None:
    original, late = Tensor.retain_grad, Retained("late")
    program = patched(patches, late)
    assert Tensor.retain_grad is original
    late.is_listening = True  # type: ignore[misc]
    program.update()
    torch.ones(1, requires_grad=True).retain_grad()
    assert HEARD == ["late"]
    late.is_listening = False  # type: ignore[misc]
    program.update()
    assert Tensor.retain_grad is original
    late.is_listening = True  # type: ignore[misc]
    program.update()
    program.restore()
    assert Tensor.retain_grad is original


def test_steps_of_all_classes_are_heard_also_those_bound_before(patches: PatchSet) -> None:
    class Later(SGD):
        def step(self) -> None:  # type: ignore[override]
            HEARD.append("Later")

    param = torch.nn.Parameter(torch.ones(1))
    bound = SGD([param], lr=1.0).step
    program = patched(patches, Steps("heard"))
    bound()
    assert HEARD == ["heard"]
    Later([param], lr=1.0).step()
    # Torch's wrapper, which runs hooks, and the step within it.
    assert HEARD == ["heard", "heard", "heard", "Later"]
    program.restore()
    patches.restore()
    bound()
    assert len(HEARD) == 4


def test_answers_come_in_the_order_of_subscribers() -> None:
    program = Program()
    assert program.tell(Subscriber.step_ended, 1) == []
    program.subscribe(Steps("one"), Regions("no steps"), Steps("two"))
    assert program.tell(Subscriber.step_ended, 1) == [None, None]


def test_global_hooks_end_with_the_stack() -> None:
    heard: list[str] = []
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    original = torch.optim.Optimizer.load_state_dict
    with listen(
        optimizer_called=lambda *_: heard.append("called"),
        optimizer_returned=lambda *_: heard.append("returned"),
        module_called=lambda *_: heard.append("module"),
        around_load_optimizer=lambda load: lambda *args: (heard.append("load"), load(*args))[0],
    ):
        optimizer.step()
        torch.nn.Identity()(1)
        optimizer.load_state_dict(optimizer.state_dict())
    assert heard == ["called", "returned", "module", "load"]
    optimizer.step()
    assert heard == ["called", "returned", "module", "load"]
    assert torch.optim.Optimizer.load_state_dict is original


class Slow(Retained):
    """Asked whether it listens, it lets another thread restore torch."""

    @property
    def is_listening(self) -> bool:  # type: ignore[override]
        if self.begins:
            self.begins = False
            self.thread.start()
            self.thread.join(0.2)
        return True

    def __init__(self) -> None:
        super().__init__("slow")
        self.begins = False
        self.thread: Any = None


def test_nothing_stays_patched_where_another_thread_restores_torch_meanwhile(patches: PatchSet) -> None:
    original, slow = Tensor.retain_grad, Slow()
    program = patched(PatchSet())
    program.subscribe(slow)
    slow.thread, slow.begins = threading.Thread(target=program.restore), True
    program.update()
    slow.thread.join()
    assert Tensor.retain_grad is original
