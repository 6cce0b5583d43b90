"""Torch is patched where a part listens, once at each site, and parts are told in the order of the table."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from autoamp.core import Parts, PatchSet, PatchSites, listen

HEARD: list[Any] = []


class Silent:
    """A part that does not listen, and changes nothing where it is told."""

    active = False

    def __init__(self, name: str = "") -> None:
        self.name = name

    def guard_all(self) -> None:
        """Do nothing."""

    def catch_up(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return types.MethodType(lambda self, original, *args, **kwargs: original, self)


class Exports(Silent):
    active = True

    def around_export(self, export: Any) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            HEARD.append(f"{self.name} begins")
            exported = export(*args, **kwargs)
            HEARD.append(f"{self.name} ends")
            return exported

        return replacement


class Steps(Silent):
    active = True

    def around_step(self, step: Any) -> Any:
        def replacement(optimizer: Any) -> None:
            HEARD.append(self.name)
            step(optimizer)

        return replacement

    def optimizer_made(self, optimizer: Any) -> None:
        """Hear of it."""


class Retained(Silent):
    def grad_retained(self, tensor: Tensor) -> None:
        HEARD.append(self.name)


@pytest.fixture
def patches() -> Iterator[PatchSet]:
    HEARD.clear()
    patches = PatchSet()
    yield patches
    patches.restore()


def patched(patches: PatchSet, **parts: Any) -> PatchSites:
    sites = PatchSites()
    sites.parts = parts_of(**parts)
    sites.patch(patches, ())
    return sites


def parts_of(**parts: Any) -> Parts:
    names = ("calls", "models", "regions", "steps", "auto_scaling", "nonfinite")
    return Parts(**{name: parts.get(name, Silent()) for name in names})


def names(patches: PatchSet) -> list[str]:
    return [patch.name for patch in patches]


def test_where_no_part_listens_torch_is_not_patched(patches: PatchSet) -> None:
    # torch puts its hooks around the step of a class with the first optimizer of it.
    SGD([torch.ones(1)], lr=0.1)
    step = SGD.step
    for _ in range(2):
        PatchSites().patch(patches, ())
        assert names(patches) == []
        patched(patches)
        assert {name.rpartition(".")[2] for name in names(patches)} <= {"__init__", "__setstate__"}
        assert SGD.step is step
        patches.restore()


def test_parts_share_one_patch_and_the_first_is_outermost(patches: PatchSet) -> None:
    original = torch.jit.trace
    patched(patches, calls=Exports("first"), models=Exports("second"))
    assert names(patches).count("torch.jit.trace") == 1
    torch.jit.trace(torch.sin, torch.ones(1), check_trace=False)
    assert HEARD == ["first begins", "second begins", "second ends", "first ends"]
    patches.restore()
    assert torch.jit.trace is original


def test_parts_are_told_when_torch_was_patched_and_restored(patches: PatchSet) -> None:
    auto_scaling, nonfinite = Exports("one"), Exports("two")
    auto_scaling.guard_all = lambda: HEARD.append("guards all")  # type: ignore[method-assign]
    nonfinite.catch_up = lambda: HEARD.append("catches up")  # type: ignore[method-assign]
    sites = patched(patches, auto_scaling=auto_scaling, nonfinite=nonfinite)
    assert HEARD == ["guards all"]
    for _ in range(2):
        sites.restore()
    assert HEARD == ["guards all", "catches up"]


def test_a_part_may_begin_to_listen(patches: PatchSet) -> None:
    original, late = Tensor.retain_grad, Retained("late")
    sites = patched(patches, auto_scaling=late)
    assert Tensor.retain_grad is original
    late.active = True  # type: ignore[misc]
    sites.update()
    torch.ones(1, requires_grad=True).retain_grad()
    assert HEARD == ["late"]
    late.active = False  # type: ignore[misc]
    sites.update()
    assert Tensor.retain_grad is original
    late.active = True  # type: ignore[misc]
    sites.update()
    sites.restore()
    assert Tensor.retain_grad is original


def test_steps_of_all_classes_are_heard_also_those_bound_before(patches: PatchSet) -> None:
    class Later(SGD):
        def step(self) -> None:  # type: ignore[override]
            HEARD.append("Later")

    param = torch.nn.Parameter(torch.ones(1))
    bound = SGD([param], lr=1.0).step
    sites = patched(patches, steps=Steps("heard"))
    bound()
    assert HEARD == ["heard"]
    Later([param], lr=1.0).step()
    # Torch's wrapper, which runs hooks, and the step within it.
    assert HEARD == ["heard", "heard", "heard", "Later"]
    sites.restore()
    patches.restore()
    bound()
    assert len(HEARD) == 4


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
    def active(self) -> bool:  # type: ignore[override]
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
    sites = PatchSites()
    sites.patch(PatchSet(), ())
    sites.parts = parts_of(auto_scaling=slow)
    slow.thread, slow.begins = threading.Thread(target=sites.restore), True
    sites.update()
    slow.thread.join()
    assert Tensor.retain_grad is original
