"""Every ``Optimizer.step`` while a handle is active: casts are off in it, and no call of it goes past a guard."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autoamp.errors import warn_user
from autoamp.program import Subscriber
from autoamp.stepping.attach import ScalesItself, guard_before
from autoamp.stepping.optimizers import GuardedOptimizers, scaled_params


class OptimizerSteps(Subscriber):
    """Stands around all steps of torch's optimizers while the handle is active, and looks at what clips gradients.

    Args:
        optimizers: Those of the handle, with their guards.
    """

    def __init__(self, optimizers: GuardedOptimizers) -> None:
        self._optimizers = optimizers
        self._active = False
        self._warned_of_clipping = False

    def started(self) -> None:
        """Stand around steps."""
        self._active = True

    def stopped(self) -> None:
        """Let all steps go as without a handle, also by replacements that somebody has kept."""
        self._active = False

    def optimizer_made(self, optimizer: Any) -> None:
        """Give a new optimizer masters, if it gets some."""
        if self._active:
            self._optimizers.optimizer_made(optimizer)

    def around_step(self, step: Any) -> Any:
        """Return a step that the optimizer's guard, if it has one, takes or skips."""
        compiling = torch.compiler.is_dynamo_compiling

        @functools.wraps(step)
        def guarded_step(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active or compiling() or id(self_) in self._optimizers.running:
                return step(self_, *args, **kwargs)
            return self._step(step, self_, args, kwargs)

        return guarded_step

    def _step(self, original: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step of any optimizer with casts off; through its guard, if the call went past that."""
        optimizers = self._optimizers
        guard, plain_step = optimizers.guard_of(optimizer), None
        # An FP16_Optimizer has a guard that is none of the handle's, and so has the optimizer inside of it.
        if guard is None and not isinstance(optimizer, ScalesItself) and guard_before(optimizer) is None:
            optimizers.program.tell(Subscriber.unguarded_step, optimizer)
            guard = optimizers.guard_of(optimizer) or optimizers.guard_around(optimizer)
            if guard is None and callable(args[0] if args else kwargs.get("closure")):
                # Now: when the closure scales the first loss, the step has begun already.
                guard = optimizers.guard(optimizer)
            plain_step = optimizers.plain_step_begins(optimizer) if guard is None else None
        if guard is not None and not guard.stepping:
            return guard.step(functools.partial(original, optimizer), args, kwargs)
        optimizers.running.add(id(optimizer))
        try:
            result = None
            if plain_step is not None and any(optimizers.program.tell(Subscriber.refuses_step, optimizer, None)):
                plain_step.skipped_by = "on_nonfinite"
            else:
                result = optimizers.casts.local.with_mode(original, False)(optimizer, *args, **kwargs)
        finally:
            optimizers.running.discard(id(optimizer))
        if plain_step is not None:
            optimizers.step_stats.plain += 1
            optimizers.program.tell(Subscriber.step_ended, plain_step)
        optimizers.casts.cache.clear()
        return result

    def clips_gradients(self, function: str, params: Iterable[Tensor]) -> None:
        """Refuse to clip gradients that a block left scaled; warn once of clipping within or between blocks."""
        self._optimizers.left_scaled.refuse(f"{function} would clip", params)
        if self._warned_of_clipping or not (scaled := scaled_params(self._optimizers)):
            return
        clipped = set(map(id, params))
        name = next((name for name, held in scaled.items() if not clipped.isdisjoint(map(id, held))), None)
        if name is not None:
            self._warned_of_clipping = True
            warn_user(
                f"{function} was called inside the scale_loss block of {name}, or after one with delay_unscale=True, "
                "where gradients are multiplied by the loss scale: it clips nearly everything. Call it after the with "
                "block of the last loss, which has no delay_unscale, before optimizer.step()"
            )
