"""Every ``Optimizer.step`` while a handle is active: casts are off in it, and no call of it goes past a guard.

The ``step`` of each class of optimizers is replaced in the class. What was bound before that, as by an LR scheduler,
goes past the replacement: torch's hooks of all optimizers see it, and refuse it for an optimizer with a guard.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoamp.errors import UsageError
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
        self._hooks: list[Any] = []
        # Optimizers whose step runs now, by id.
        self._running: set[int] = set()

    def start(self, patches: PatchSet) -> None:
        """Replace the steps of all classes, and those of classes to come once they have an instance.

        Args:
            patches: Take the replacements, and are restored after `stop`.
        """
        with patches.all_or_nothing():
            for cls in _subclasses(Optimizer):
                self._reach(cls, patches)
            for name in ("__init__", "__setstate__"):
                original = vars(Optimizer)[name]
                patches.replace(Optimizer, name, imitate(self._reaching(original, patches), original))
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def stop(self) -> None:
        """Let all steps go as without a handle, also by replacements that somebody has kept."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _reaching(self, original: Any, patches: PatchSet) -> Any:
        def replacement(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self._hooks:
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

    def _around(self, original: Any) -> Any:
        compiling = torch.compiler.is_dynamo_compiling

        @functools.wraps(original)
        def step(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._hooks or compiling() or id(self_) in self._running:
                return original(self_, *args, **kwargs)
            return self._step(original, self_, args, kwargs)

        return step

    def _step(self, original: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step of any optimizer with casts off; through its guard, if the call went past that."""
        guard = self._optimizers.guard_of(optimizer)
        if guard is None and not has_other_guard(optimizer):
            guard = self._guard_at_step(optimizer, args[0] if args else kwargs.get("closure"))
        if guard is not None and not guard.stepping:
            return guard.step(functools.partial(original, optimizer), args, kwargs)
        self._running.add(id(optimizer))
        try:
            result = self._optimizers.casts.local.bound(original, False)(optimizer, *args, **kwargs)
        finally:
            self._running.discard(id(optimizer))
        if guard is None and not has_other_guard(optimizer):
            self._optimizers.plain_step_ended()
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
        guard = optimizers.guard_of(optimizer)
        if guard is None and callable(closure):
            guard = optimizers.guard(optimizer)
        if guard is None:
            optimizers.plain_step_begins(optimizer)
        return guard

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at a step that went past its class, and refuse it if it went past its guard as well."""
        if torch.compiler.is_dynamo_compiling() or id(optimizer) in self._running:
            return
        self._refuse_past_guard(optimizer)

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_dynamo_compiling() or id(optimizer) in self._running:
            return
        # Its closure may have scaled its first loss.
        self._refuse_past_guard(optimizer)
        if self._optimizers.guard_of(optimizer) is None and not has_other_guard(optimizer):
            self._optimizers.plain_step_ended()
        self._optimizers.casts.cache.clear()

    def _refuse_past_guard(self, optimizer: Any) -> None:
        guard = self._optimizers.guard_of(optimizer)
        if guard is not None and not guard.stepping:
            raise UsageError(
                f"this step of {guard.name} goes past optimizer.step, so that an overflow would not be skipped; call "
                "optimizer.step(), not a method that was bound before the first scale_loss"
            )


def _subclasses(cls: type) -> Iterator[type]:
    derived: type
    for derived in type.__subclasses__(cls):
        yield derived
        yield from _subclasses(derived)
