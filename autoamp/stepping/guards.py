"""The guards of a handle's optimizers, and the master weights that these step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from autoamp.errors import UsageError
from autoamp.scaling import LossScaler
from autoamp.stepping.attach import refuse_unguardable, stepped_params, takes_flag
from autoamp.stepping.guard import StepGuard
from autoamp.stepping.loss_scalers import LossScalers
from autoamp.stepping.masters import MasterWeights
from autoamp.stepping.setting_warnings import check_optimizer
from autoamp.stepping.skips import StepCounts, StepOwner


class Guards(StepOwner[StepGuard]):
    """Guards of optimizers, each made when it is first asked for, and kept as long as its optimizer lives.

    Args:
        scalers: One for each ``loss_id``.

    Attributes:
        loss_scalers: Those that were given, and all that came later.
        step_stats: How many steps there were, and skips.
        models_with_masters: An optimizer that is guarded from now on gets masters if it steps parameters of these.
        running: Optimizers of torch's classes whose step runs now, by id.
    """

    def __init__(self, scalers: Sequence[LossScaler]) -> None:
        self.loss_scalers = LossScalers(scalers)
        self.step_stats = StepCounts(self.loss_scalers.catch_up)
        self.models_with_masters: weakref.WeakSet[Module] = weakref.WeakSet()
        self.running: set[int] = set()
        self._guards: weakref.WeakKeyDictionary[Any, StepGuard] = weakref.WeakKeyDictionary()

    @property
    def guards(self) -> list[StepGuard]:
        """The guards of all optimizers that live."""
        return list(self._guards.values())

    def guard_of(self, optimizer: Any) -> StepGuard | None:
        """Return the optimizer's guard, None where it has none."""
        try:
            return self._guards.get(optimizer)
        except TypeError:
            # What no weak reference can be made to.
            return None

    def guard_around(self, optimizer: Any) -> StepGuard | None:
        """Return the guard that has checked the gradients of an optimizer without one; None where none has.

        A wrapper such as SAM was given to ``scale_loss`` and steps the optimizer within it outside of its own step. An
        optimizer that takes found_inf on its device would not get it there, so the guard of one is passed over.
        """
        for guard in self.guards:
            if guard.pending.checks and not guard.stepping and not takes_flag(guard.optimizer):
                params = set(map(id, guard.grads.params()))
                if all(id(param) in params for param in stepped_params(optimizer)):
                    return guard
        return None

    def guard(self, optimizer: Any, *, check: bool = True) -> StepGuard:
        """Return the optimizer's guard, a new one the first time. UsageError: this is no optimizer to guard.

        Args:
            optimizer: Anything with ``param_groups`` and ``step``.
            check: Whether to warn, the first time, of settings that half parameters without masters cannot take.
        """
        guard = self.guard_of(optimizer)
        if guard is None:
            refuse_unguardable(optimizer)
            guard = self.guard_of(_wrapped_by(optimizer))
        if guard is None:
            wants_masters = steps_any_of(self.models_with_masters, optimizer)
            guard = self._put_guard(optimizer, MasterWeights(optimizer) if wants_masters else None)
            if check and guard.masters is None:
                check_optimizer(optimizer)
        return guard

    def _put_guard(self, optimizer: Any, masters: MasterWeights | None) -> StepGuard:
        guard = StepGuard(optimizer, lambda: self, masters=masters)
        if id(optimizer) in self.running:
            raise UsageError(
                f"The first scale_loss of {guard.name} came while its step() runs; pass what evaluates the loss as "
                "optimizer.step(closure), or call scale_loss before step()"
            )
        guard.install()
        self._guards[optimizer] = guard
        return guard

    # -- masters --

    @property
    def has_masters(self) -> bool:
        """Whether an optimizer steps master weights, or will."""
        return bool(self.models_with_masters) or any(guard.masters is not None for guard in self.guards)

    def masters_of(self, optimizer: Any) -> MasterWeights | None:
        """Return an optimizer's masters, None where it has none."""
        guard = self.guard_of(optimizer)
        return None if guard is None else guard.masters

    def keep_masters(self, optimizer: Any, originals: Mapping[int, Tensor] | None = None) -> MasterWeights:
        """Let an optimizer step fp32 masters of its half parameters from now on."""
        masters = self.masters_of(optimizer)
        if masters is None:
            refuse_unguardable(optimizer)
            # First of all: what an earlier guard left scaled is in the gradients of the half parameters.
            self.hand_over(optimizer)
            masters = MasterWeights(optimizer, originals)
            self._put_guard(optimizer, masters)
        else:
            masters.adopt(originals)
        return masters

    def hand_over(self, optimizer: Any) -> MasterWeights | None:
        """Let go of an optimizer and return its masters, which stay in place."""
        guard = self._guards.pop(optimizer, None)
        if guard is None:
            return None
        guard.uninstall()
        return guard.masters

    def let_go(self, optimizers: Sequence[Any], params: Iterable[Tensor]) -> None:
        """Give these optimizers, and all that step one of the parameters, back what they had of these parameters."""
        params = list(params)
        meant = set(map(id, params))
        for optimizer, guard in list(self._guards.items()):
            masters = guard.masters
            own = [*stepped_params(optimizer), *([] if masters is None else (half for half, _ in masters.pairs))]
            if not (any(optimizer is named for named in optimizers) or any(id(param) in meant for param in own)):
                continue
            if masters is not None:
                masters.dissolve(params)
                if len(masters):
                    # It steps other models as well.
                    continue
                masters.dissolve()
            self.hand_over(optimizer)
            self.loss_scalers.forget_own(optimizer)

    def release(self) -> None:
        """Give every optimizer its step and its parameters back."""
        if self.step_stats.own_scale is not None:
            # Of the program's scaler nothing is kept but the number.
            self.step_stats.own_scale = float(self.step_stats.own_scale)
        # The optimizers live as long as this list does, and their guards refer to them weakly.
        optimizers = list(self._guards)
        # All guards go first: what one left scaled may be the gradients of a master that another one has too.
        for masters in [self.hand_over(optimizer) for optimizer in optimizers]:
            if masters is not None:
                masters.dissolve()
        for optimizer in self.loss_scalers.with_own():
            self.loss_scalers.forget_own(optimizer)


def steps_any_of(models: Iterable[Module], optimizer: Any) -> bool:
    """Whether an optimizer steps a parameter of the models."""
    params = {id(param) for model in models for param in model.parameters()}
    return bool(params) and any(id(param) in params for param in stepped_params(optimizer))


def _wrapped_by(wrapper: Any) -> Any:
    """Return the optimizer that a wrapper hands its calls to, as those of accelerate and Fabric do; None for others.

    The gradients are there, in masters too, and the wrapper may not step each time when it is called.
    """
    inner = getattr(wrapper, "optimizer", None)
    return inner if getattr(inner, "param_groups", None) is wrapper.param_groups else None
