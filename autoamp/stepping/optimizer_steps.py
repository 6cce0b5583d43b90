"""Every ``Optimizer.step`` while a handle is active: casts are off in it, and no call of it goes past a guard.

Torch wraps the ``step`` of each class of optimizers to run hooks. The wrapper is replaced in the class. A wrapper that
was bound before that, as by an LR scheduler, is met as well: the function that it calls is replaced in its closure.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from autoamp.patching import PatchSet, imitate, original_of
from autoamp.stepping.attach import has_other_guard
from autoamp.stepping.guard import StepGuard
from autoamp.stepping.optimizers import GuardedOptimizers

__all__ = ["OptimizerSteps"]


class OptimizerSteps:
    """Stands around all steps of torch's optimizers from `start` to `stop`.

    Args:
        optimizers: Those of the handle, with their guards.
    """

    def __init__(self, optimizers: GuardedOptimizers) -> None:
        self._optimizers = optimizers
        self._active = False
        # The closure cells of torch's wrappers that were written to, with their contents before.
        self._cells: list[tuple[Any, Any]] = []

    def start(self, patches: PatchSet) -> None:
        """Replace the steps of all classes, and those of classes to come once they have an instance.

        Args:
            patches: Take the replacements, and are restored after `stop`.
        """
        self._active = True
        with patches.all_or_nothing():
            for cls in _subclasses(Optimizer):
                self._reach(cls, patches)
            for name in ("__init__", "__setstate__"):
                original = vars(Optimizer)[name]
                patches.replace(Optimizer, name, imitate(self._reaching(original, patches), original))

    def stop(self) -> None:
        """Let all steps go as without a handle, also by replacements that somebody has kept."""
        self._active = False
        for cell, original in self._cells:
            cell.cell_contents = original
        self._cells = []

    def _reaching(self, original: Any, patches: PatchSet) -> Any:
        def replacement(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self._active:
                self._reach(type(optimizer), patches)
                self._optimizers.optimizer_made(optimizer)

        return replacement

    def _reach(self, cls: type, patches: PatchSet) -> None:
        """Replace the steps of a class and of those that it derives from, as far as torch has put its hooks there."""
        replaced = {id(patch.parent) for patch in patches if patch.attribute == "step"}
        for base in cls.__mro__:
            step = vars(base).get("step")
            if getattr(step, "hooked", False) and id(base) not in replaced:
                original = original_of(step)
                patches.replace(base, "step", imitate(self._around(original), original))
                for cell in _cells_of_wrapped(original):
                    self._cells.append((cell, cell.cell_contents))
                    cell.cell_contents = self._around(cell.cell_contents)

    def _around(self, original: Any) -> Any:
        compiling = torch.compiler.is_dynamo_compiling

        @functools.wraps(original)
        def step(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active or compiling() or id(self_) in self._optimizers.running:
                return original(self_, *args, **kwargs)
            return self._step(original, self_, args, kwargs)

        return step

    def _step(self, original: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step of any optimizer with casts off; through its guard, if the call went past that."""
        guard, plain_step = self._optimizers.guard_of(optimizer), None
        if guard is None and not has_other_guard(optimizer):
            guard = self._guard_at_step(optimizer, args[0] if args else kwargs.get("closure"))
            plain_step = self._optimizers.plain_step_begins(optimizer) if guard is None else None
        if guard is not None and not guard.stepping:
            return guard.step(functools.partial(original, optimizer), args, kwargs)
        self._optimizers.running.add(id(optimizer))
        try:
            result = None
            if plain_step is not None and self._optimizers.look(optimizer, None):
                plain_step.skipped = True
            else:
                result = self._optimizers.casts.local.bound(original, False)(optimizer, *args, **kwargs)
        finally:
            self._optimizers.running.discard(id(optimizer))
        if plain_step is not None:
            self._optimizers.plain_step_ended(plain_step)
        self._optimizers.casts.cache.clear()
        return result

    def _guard_at_step(self, optimizer: Any, closure: Any) -> StepGuard | None:
        """Return the guard that an optimizer without one gets as it steps; None where it goes on without.

        One that is called with a closure gets a guard now: when the closure scales the first loss, the step has begun
        already.
        """
        optimizers = self._optimizers
        if optimizers.on_unguarded is not None:
            optimizers.on_unguarded(optimizer)
        guard = optimizers.guard_of(optimizer) or optimizers.guard_around(optimizer)
        if guard is None and callable(closure):
            guard = optimizers.guard(optimizer)
        return guard


def _cells_of_wrapped(step: Any) -> Iterator[Any]:
    """Yield the closure cell in which torch's wrapper of a step has the step itself, unless that is replaced."""
    while getattr(getattr(step, "__wrapped__", None), "hooked", False):
        # Somebody else's wrapper around torch's.
        step = step.__wrapped__
    for cell in getattr(step, "__closure__", None) or ():
        if cell.cell_contents is getattr(step, "__wrapped__", cell):
            yield cell


def _subclasses(cls: type) -> Iterator[type]:
    derived: type
    for derived in type.__subclasses__(cls):
        yield derived
        yield from _subclasses(derived)
