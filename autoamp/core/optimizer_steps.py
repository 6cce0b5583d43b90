"""Stands around the steps of torch's optimizers: steps that a guard missed, and clipped gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autoamp.core.attach import ScalesItself, guard_before, stepped_params, takes_flag
from autoamp.core.auto_scale import AutoScale
from autoamp.core.guard import StepGuard
from autoamp.core.guarded_optimizers import GuardedOptimizers
from autoamp.core.skips import Step
from autoamp.core.unread_flags import is_same_scale
from autoamp.errors import UsageError, warn_user


class OptimizerSteps:
    """Stands around all steps of torch's optimizers while the handle is active, and looks at what clips gradients.

    Args:
        optimizers: Those of the handle, with their guards.
        auto_scaling: Guards optimizers that it has not met before.
    """

    def __init__(self, optimizers: GuardedOptimizers, auto_scaling: AutoScale) -> None:
        self._auto_scaling = auto_scaling
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

    def around_state_made(self, make: Any) -> Any:
        """Return what makes the state without a step that counts, and refuses optimizers of masters.

        torch looks the tensors that are stepped up among the model's parameters, and would load half values.
        """

        @functools.wraps(make)
        def make_state(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return make(optimizer, *args, **kwargs)
            guard, running = guard_before(optimizer), self._optimizers.running
            if guard is not None and guard.masters is not None:
                raise UsageError(
                    f"{type(optimizer).__name__} steps fp32 masters, and the model has half parameters: "
                    "torch.distributed.checkpoint.state_dict does not find one by the other. Save and load "
                    "autoamp.DistributedState(model, optimizer), which has the keys of get_optimizer_state_dict with "
                    "flatten_optimizer_state_dict=True; its state_dict() and load_state_dict() do without files"
                )
            running.add(id(optimizer))
            try:
                with contextlib.nullcontext() if guard is None else guard.uncounted():
                    return self._optimizers.casts.local.with_mode(make, False)(optimizer, *args, **kwargs)
            finally:
                running.discard(id(optimizer))

        return make_state

    def _step(self, original: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step of any optimizer with casts off; through its guard, if the call went past that."""
        optimizers = self._optimizers
        guard = optimizers.guard_of(optimizer)
        plain_step: Step | None = None
        # An FP16_Optimizer has a guard that is none of the handle's, and so has the optimizer inside of it.
        if guard is None and not isinstance(optimizer, ScalesItself) and guard_before(optimizer) is None:
            self._auto_scaling.unguarded_step(optimizer)
            guard = optimizers.guard_of(optimizer) or _guard_around(optimizers.guards, optimizer)
            if guard is None and callable(args[0] if args else kwargs.get("closure")):
                # Now: when the closure scales the first loss, the step has begun already.
                guard = optimizers.guard(optimizer)
            if guard is None:
                # Without loss scaling. Its gradients may be scaled all the same.
                optimizers.left_scaled.refuse(f"{type(optimizer).__name__} would use", stepped_params(optimizer))
                optimizers.current.begin()
                optimizers.check_underflow(optimizer)
                plain_step = optimizers.step_stats.last = Step()

        def run(*args: Any, **kwargs: Any) -> Any:
            optimizers.running.add(id(optimizer))
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                optimizers.running.discard(id(optimizer))

        if guard is not None and not guard.stepping:
            return guard.step(run, args, kwargs)
        result = None
        if plain_step is not None and optimizers.current.refuses(optimizer, None):
            plain_step.skipped_by = "on_nonfinite"
        else:
            result = optimizers.casts.local.with_mode(run, False)(*args, **kwargs)
        if plain_step is not None:
            optimizers.step_stats.plain += 1
            optimizers.current.end(plain_step)
        optimizers.casts.cache.clear()
        return result

    def clips_gradients(self, function: str, params: Iterable[Tensor]) -> None:
        """Refuse to clip gradients that a block left scaled; warn once of clipping within or between blocks."""
        left = self._optimizers.left_scaled
        scaled = [guard for guard in self._optimizers.guards if _is_scaled(guard)]
        if not left and (not scaled or self._warned_of_clipping):
            return
        params = list(params)
        if function == "get_total_norm":
            given = set(map(id, params))
            leaves = (leaf for guard in scaled for leaf in guard.grads.leaves())
            params = [leaf for leaf in (*left.params(), *leaves) if id(leaf.grad) in given]
        left.refuse(f"{function} would {'use' if function == 'get_total_norm' else 'clip'}", params)
        clipped = set(map(id, params))
        for guard in () if self._warned_of_clipping else scaled:
            if not clipped.isdisjoint(map(id, guard.grads.leaves())):
                self._warned_of_clipping = True
                warn_user(
                    f"{function} was called inside the scale_loss block of {guard.name}, or after one with "
                    "delay_unscale=True, where gradients are multiplied by the loss scale: it clips nearly everything. "
                    "Call it after the with block of the last loss, which has no delay_unscale, before optimizer.step()"
                )
                return


def _is_scaled(guard: StepGuard) -> bool:
    grads = guard.grads
    return (guard.in_block or grads.delayed is not None) and not is_same_scale(grads.scale, 1.0)


def _guard_around(guards: Iterable[StepGuard], optimizer: Any) -> StepGuard | None:
    """Return the guard that stands for an optimizer without one: its checks and masters are of the same parameters.

    A wrapper such as SAM was given to ``scale_loss`` and steps the optimizer within it outside of its own step. At a
    loss scale of 1.0 there are no checks, and masters have to be copied down all the same. An optimizer that takes
    found_inf on its device would not get it there, so the guard of one is passed over.
    """
    for guard in guards:
        has_part = guard.grads.checks or guard.masters is not None
        if has_part and not guard.stepping and not takes_flag(guard.optimizer):
            params = set(map(id, guard.grads.params()))
            if all(id(param) in params for param in stepped_params(optimizer)):
                return guard
    return None
