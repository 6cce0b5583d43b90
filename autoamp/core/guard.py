"""What ``optimizer.step()`` must do next: step, skip, or call its closure again at a lower loss scale.

A `StepGuard` stands in front of one optimizer. Blocks and backward passes of its losses leave an `OverflowCheck` with
it, whose flags stay on the device. ``optimizer.step()`` reads the flags of all checks since the last step at once,
tells the loss scalers, and steps or skips. An optimizer that takes the flag of an overflow on its device, as torch's
fused ones do for `torch.amp.GradScaler`, gets it there: nobody waits for the device, and the guard hears later whether
that was a skip.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.core.attach import (
    AttachedMethod,
    GradsCopy,
    StepCopy,
    forget_state,
    named_params,
    state_size,
    takes_flag,
)
from autoamp.core.gradients import non_finite
from autoamp.core.loss_scale import LossScaler
from autoamp.core.masters import MasterWeights
from autoamp.core.overflow_checks import GuardedGrads, OverflowCheck
from autoamp.core.ranks import several_processes
from autoamp.core.steps import Skips, StepOwner
from autoamp.errors import NonFiniteGradientsError, UsageError
from autoamp.tensors import version_of

# So many halvings lead from the highest default scale, 2**24, far below 1, where no scale is to blame any more.
_MAX_EVALUATIONS = 33


class StepGuard:
    """Stands in front of one optimizer's ``step`` from `install` to `uninstall`.

    The optimizer is anything with ``param_groups`` and ``step``. It refers to the guard, and the guard refers to it
    weakly. A deep copy of the optimizer, or an unpickled one, is not guarded.

    Args:
        optimizer: What to guard.
        owner: Returns what it asks and tells: the optimizers of a handle, which may be another one at each call.
        masters: The masters that it steps in place of half parameters. They take the gradients and what was written
            into half parameters before a step, and are copied into the half parameters after it.

    Attributes:
        name: The name of the optimizer's class.
        masters: As given.
        grads: The optimizer's gradients, and the checks on them since the last step.
        skips: What is known of its steps and skips.
        in_block: Whether a block of this optimizer is open.
        stepping: Whether the optimizer is stepping now, as this guard lets it.
        repeats_closure: Whether the first evaluation of a closure may be repeated at a lower scale. Not where programs
            know nothing of loss scaling: a closure may draw its batch.
        scaled: Whether a block has had a loss of this optimizer.
        backward_seen: Whether the scaled loss was run backward in one.
        compared_settings: Whether settings were compared with the ranks that step together with this one.
    """

    def __init__(
        self, optimizer: Any, owner: Callable[[], StepOwner[StepGuard]], *, masters: MasterWeights | None = None
    ) -> None:
        self._attached: weakref.ref[AttachedMethod] | None = None
        self.owner = owner
        self.name, self.masters = type(optimizer).__name__, masters
        self.skips = Skips(self.name, owner)
        self.grads = GuardedGrads(optimizer, masters, self.skips, owner)
        self.in_block = self.stepping = False
        self.repeats_closure = True
        self.scaled = self.backward_seen = self.compared_settings = False

    @property
    def optimizer(self) -> Any:
        """The optimizer, None once it is gone."""
        return self.grads.optimizer

    def install(self) -> None:
        """Put the guard in front of ``optimizer.step``.

        Raises:
            UsageError: This is no optimizer, or its step cannot be replaced.
        """
        # The optimizer refers to the attached step, and that to the guard: no cycle, and all go with the optimizer.
        self._attached = weakref.ref(AttachedMethod(self.optimizer, "step", self.step))

    def uninstall(self) -> None:
        """Put back the step that was there; under a wrapper that somebody layered above, let all calls pass.

        Pending checks are dropped; gradients that ``delay_unscale`` left scaled get their true values.
        """
        attached = None if self._attached is None else self._attached()
        if attached is not None and self.optimizer is not None:
            self.grads.finish_delayed()
            self.grads.checks = []
            attached.detach()

    # -- steps --

    def step(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step or skip: what ``optimizer.step(*args, **kwargs)`` does, where ``original`` does it without a guard.

        Raises:
            UsageError: A block of this optimizer is open.
            NonFiniteGradientsError: There were too many skips in a row.
        """
        if self.stepping:
            # Within `uncounted`, or within a step of its own.
            return original(*args, **kwargs)
        if self.in_block:
            raise UsageError(
                f"{self.name}.step() was called inside its scale_loss block, where gradients are still multiplied by "
                f"{float(self.grads.scale):g}; move optimizer.step() after the with block"
            )
        closure = args[0] if args else kwargs.get("closure")
        last_step = self.skips.step
        self.skips.begin()
        self.owner().step_begins(self)
        if not callable(closure):
            self.owner().refuse_scaled(self)
        if self.masters is not None:
            self.masters.collect()
        self.grads.finish_delayed()
        self.grads.recheck(makes_gradients=callable(closure), last_step=last_step)
        try:
            if callable(closure):
                result = _step_with_closure(self, closure, original, args, kwargs)
            else:
                result = self._step_by_checks(original, args, kwargs)
        finally:
            self.grads.agreed = False
            self.params_changed()
        self.owner().steps.end(self.skips.step)
        return result

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Let steps pass that are none of the training, as one that only makes the optimizer's state."""
        before, self.stepping = self.stepping, True
        try:
            yield
        finally:
            self.stepping = before

    def is_refused(self) -> bool:
        """Whether ``on_nonfinite`` refuses the step, by gradients that no loss scale checked."""
        return self.owner().steps.refuses(self.optimizer, self)

    def _step_by_checks(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer = self.optimizer
        # Asked here too, as most optimizers have none.
        flag = self._flag_for_device(optimizer) if getattr(optimizer, "_step_supports_amp_scaling", False) else None
        if flag is None:
            blamed = self.grads.resolve()
            if blamed is not None or self.is_refused():
                return self.skip(blamed)
            return self.take(original, args, kwargs)
        known = state_size(optimizer)
        optimizer.found_inf = flag
        try:
            result = self._call(original, args, kwargs)
        finally:
            del optimizer.found_inf
        if state_size(optimizer) != known and bool(flag):
            # torch.optim.SGD(fused=True) would take the momentum that it has allocated here for that of a step.
            forget_state(optimizer, known)
        return result

    def params_changed(self) -> None:
        """Bring up to date what follows from the parameters, which a step may have changed."""
        casts = self.owner().casts
        if casts is not None:
            casts.cache.clear()
        # An optimizer that skips by itself, on its device, leaves the masters as they were.
        if self.masters is not None and self.skips.step.skipped_by is None:
            self.masters.copy_down()

    def _flag_for_device(self, optimizer: Any) -> Tensor | None:
        """Return the flag of an overflow that the optimizer takes on its device; None where checks are to be read.

        The convention is that of `torch.amp.GradScaler`. Not where the step has hooks, which would run in a skipped one
        too, nor where the program has given a flag itself.
        """
        if (
            not takes_flag(optimizer)
            or getattr(optimizer, "found_inf", None) is not None
            or getattr(optimizer, "_optimizer_step_pre_hooks", None)
            or getattr(optimizer, "_optimizer_step_post_hooks", None)
        ):
            return None
        flag = self.grads.resolve_on_device()
        if flag is not None and self.skips.in_a_row >= self.owner().max_consecutive_skips:
            raise self._too_many_skips(self.grads.resolved[0].scaler)
        return flag

    def take(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the optimizer step, with casts off."""
        result = self._call(original, args, kwargs)
        self.skips.end(self.skips.step)
        return result

    def begin_masters(self) -> None:
        """Let the masters take what was written into half parameters; once that is done this changes nothing."""
        if self.masters is not None:
            asked = self.grads.requested_group
            self.masters.refresh(first_step=True, local=asked is not None and asked.replicas == 1)

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self.stepping = self.stepping, True
        try:
            self.begin_masters()
            casts = self.owner().casts
            return (original if casts is None else casts.local.with_mode(original, False))(*args, **kwargs)
        finally:
            self.stepping = before

    def skip(self, blamed: OverflowCheck | None) -> Any:
        """Count a skipped step; None for one that ``on_nonfinite`` has refused, and counted.

        Raises:
            NonFiniteGradientsError: There were too many in a row.
        """
        # A step was due and came: LR schedulers look at this before they complain about the order of calls.
        self.optimizer._opt_called = True
        if blamed is None:
            self.skips.step.skipped_by = "on_nonfinite"
            return
        self.skips.end(self.skips.step, blamed.scaler, float(blamed.scale))
        if self.skips.in_a_row >= self.owner().max_consecutive_skips:
            raise self._too_many_skips(blamed.scaler, blamed.cleared)

    def _too_many_skips(self, scaler: LossScaler, cleared: Sequence[Tensor] = ()) -> NonFiniteGradientsError:
        known = {id(param) for param in cleared}
        named = [(name, param.grad) for name, param in named_params(self.optimizer) if param.grad is not None]
        found = [name for name, param in named_params(self.optimizer) if id(param) in known] or non_finite(named)
        gone = "gradients that are gone by now" + (", or on another rank" if several_processes() else "")
        explained = self.skips.step.explanation
        return NonFiniteGradientsError(
            f"{self.skips.in_a_row} steps of {self.name} in a row were skipped for inf or nan in the gradients, "
            f"first in {', '.join(found) or gone}; the loss scale is {scaler.loss_scale:g}. Look for "
            "inf or nan in the data and the loss, for too high a learning rate, for ops that need fp32. "
            f"max_consecutive_skips={self.owner().max_consecutive_skips} is the limit"
            + ("" if explained is None else f". The last of them: {explained}"),
            overflow=explained,
        )


# -- closures --


class _TrainingFailed(BaseException):
    """Leaves an optimizer's step from within its closure, with the loss and the check to blame, if one is."""


def _step_with_closure(
    guard: StepGuard,
    closure: Callable[[], Any],
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step an optimizer that evaluates the loss itself. Returns what the step returns.

    Raises:
        NonFiniteGradientsError: Gradients overflow at all scales with the parameters moved, and such a step is not
            undone.
    """
    guard.grads.resolve_dropped_grads()
    blamed = guard.grads.resolve()
    if blamed is not None:
        guard.skip(blamed)
        return None if guard.repeats_closure else _call_closure(guard, closure)
    guard.begin_masters()
    undo = StepCopy(guard.optimizer) if guard.owner().undoes_steps else None
    versions, begun = [version_of(param) for param in guard.grads.params()], False

    def evaluate() -> Any:
        nonlocal begun
        first, begun = not begun and versions == [version_of(param) for param in guard.grads.params()], True
        guard.params_changed()
        loss, blamed = _evaluate(guard, closure, 1 if first and not guard.repeats_closure else _MAX_EVALUATIONS)
        if blamed is None and not guard.is_refused():
            return loss
        if first or undo is not None or blamed is None:
            raise _TrainingFailed(loss, blamed)
        raise NonFiniteGradientsError(
            f"gradients overflowed at loss scale {float(blamed.scale):g} when {guard.name} called its closure in the "
            "middle of a step, and no lower scale is allowed or helps. The parameters are at an intermediate point: "
            "load the last checkpoint, and train with a lower static loss scale, bf16 or fp32"
        )

    known = state_size(guard.optimizer)
    try:
        if args:
            return guard.take(original, (evaluate, *args[1:]), kwargs)
        return guard.take(original, (), {**kwargs, "closure": evaluate})
    except (_TrainingFailed, NonFiniteGradientsError) as given_up:
        if undo is not None:
            undo.restore()
            guard.params_changed()
        if isinstance(given_up, NonFiniteGradientsError):
            raise
        forget_state(guard.optimizer, known)
        loss, blamed = given_up.args
        guard.skip(blamed)
        return loss


def _call_closure(guard: StepGuard, closure: Callable[[], Any]) -> Any:
    """Call a closure as outside of a step, during which casts are off. They stay off where they are forced off."""
    casts = guard.owner().casts
    # True, as the step has replaced what the thread had set.
    casting = contextlib.nullcontext() if casts is None else casts.switched(None if casts.in_modules else True)
    with casting, torch.enable_grad():
        return closure()


def _evaluate(guard: StepGuard, closure: Callable[[], Any], attempts: int) -> tuple[Any, OverflowCheck | None]:
    """Evaluate a closure, at lower scales if it overflows. Returns its loss, and the check left to blame."""
    grads = guard.grads
    if guard.skips.steps > 1 and grads.last is None:
        # The steps before scaled no loss, so gradients are not copied. If this one does, its first overflow is a skip.
        attempts = 1
    may_repeat = attempts > 1 and any(scaler.checks for scaler in guard.grads.scalers)
    before = GradsCopy(grads.params()) if may_repeat else None
    for attempt in range(attempts):
        if attempt and before is not None:
            # The closure may leave zero_grad() to the lines before the step, or add to the gradients of other losses.
            before.restore(grads.params())
        loss = _call_closure(guard, closure)
        guard.owner().refuse_scaled(guard)
        if guard.masters is not None:
            guard.masters.collect()
        grads.finish_delayed()
        loss_is_nonfinite = not _is_finite(loss)
        if (group := grads.group) is not None:
            loss_is_nonfinite = bool(grads.agree(group, loss_is_nonfinite=loss_is_nonfinite).loss_is_nonfinite)
        else:
            grads.recheck(makes_gradients=True)
        # A pass may have had a lower scale than its scaler, which tells whether there is a lower one.
        scales = {id(check.scaler): check.scaler.loss_scale for check in grads.checks}
        blamed = grads.resolve()
        # A lower scale helps against large gradients, not against a loss that is inf already.
        if blamed is None or loss_is_nonfinite or blamed.scaler.loss_scale >= scales[id(blamed.scaler)]:
            break
    return loss, blamed


def _is_finite(loss: Any) -> bool:
    if isinstance(loss, Tensor):
        return bool(loss.detach().isfinite().all())
    return not isinstance(loss, float) or math.isfinite(loss)
