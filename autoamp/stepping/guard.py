"""What ``optimizer.step()`` must do next: step, skip, or call its closure again at a lower loss scale.

A `StepGuard` stands in front of one optimizer. Blocks and backward passes of its losses leave an `OverflowCheck` with
it, whose flags stay on the device. ``optimizer.step()`` reads the flags of all checks since the last step at once,
tells the loss scalers, and steps or skips. An optimizer that takes the flag of an overflow on its device, as torch's
fused ones do for `torch.amp.GradScaler`, gets it there: nobody waits for the device, and the guard hears later whether
that was a skip.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from autoamp.casting import Casts
from autoamp.errors import NonFiniteGradientsError, UsageError
from autoamp.scaling import (
    FoundInfReduction,
    LossScaler,
    RequestedGroup,
    Scale,
    SyncGroup,
    SyncGroups,
    clip_,
    found_any,
    non_finite,
    powered_norm,
    reduce_partial,
    unscale_,
)
from autoamp.stepping.attach import AttachedMethod, named_params, stepped_params
from autoamp.stepping.checked_grads import CheckedGrads
from autoamp.stepping.masters import MasterWeights
from autoamp.stepping.replicas import several_processes
from autoamp.stepping.skips import SkipOwner, Skips, Step
from autoamp.stepping.undo import StepCopy
from autoamp.tensors import version_of

__all__ = [
    "GuardOwner",
    "OverflowCheck",
    "PendingChecks",
    "ScaledGrads",
    "StepGuard",
    "read_checks",
]

# So many halvings lead from the highest default scale, 2**24, far below 1, where no scale is to blame any more.
_MAX_EVALUATIONS = 33

# At most so many checks wait for a step. Then they are read, and one that overflowed is left.
_MAX_PENDING_CHECKS = 64


class GuardOwner(SkipOwner, Protocol):
    """What a guard asks of the handle or the optimizer that made it."""

    @property
    def casts(self) -> Casts | None:
        """What casts for the program: off while the optimizer steps, and on in a closure."""

    @property
    def scalers(self) -> Sequence[LossScaler]:
        """All loss scalers, in the same order on all ranks."""

    def step_begins(self, guard: StepGuard) -> None:
        """Hear of each step, before it is taken or skipped."""

    def refuse_scaled(self, guard: StepGuard) -> None:
        """Raise UsageError if gradients of the optimizer are scaled still, by a block that did not name it."""

    @property
    def undoes_steps(self) -> bool:
        """Whether a step that meets inf or nan in its middle, in a later evaluation of its closure, is undone."""

    def wants_skip(self, guard: StepGuard) -> bool:
        """Look at gradients that no loss scale checked, and tell whether the program wants the step skipped for them.

        Args:
            guard: Of the optimizer that is about to step.
        """

    def step_ended(self, guard: StepGuard) -> None:
        """Hear of each step or skip, once parameters are as it left them."""

    def requested_group(self, guard: StepGuard) -> RequestedGroup | None:
        """Return the process group over which the program wants steps to be agreed on, if it asked for one."""


class _Reported:
    """The result of a block or pass that its scaler has heard: None for none yet, else whether gradients overflowed."""

    overflowed: bool | None = None


class OverflowCheck:
    """What one scaled block or backward pass found in the gradients, read or still on the device.

    Optimizers that share a block share its check: the scaler hears of the block once.

    Args:
        scaler: The scaler of the block.
        scale: The scale of the block.
        found: What `autoamp.scaling.unscale_` returned, and other tensors like these.
        earlier: An earlier check of the same block or pass, if there is one: the scaler hears of it once.

    Attributes:
        scaler: As given.
        scale: As given.
        reported: The result that the scaler has heard.
        overflowed: Whether an inf or nan was there; None as long as nobody has read it.
        is_complete: Whether nothing more is going to be found. Then a step may leave it unread.
    """

    is_complete = True

    def __init__(
        self, scaler: LossScaler, scale: Scale, found: Sequence[Tensor], earlier: OverflowCheck | None = None
    ) -> None:
        self.scaler = scaler
        self.scale = scale
        self.reported: _Reported = _Reported() if earlier is None else earlier.reported
        self.overflowed: bool | None = None
        self._found = found

    @property
    def found(self) -> Sequence[Tensor]:
        """The flags that are to be read; none once they were."""
        return self._found if self.overflowed is None else ()

    @property
    def flags(self) -> Sequence[Tensor]:
        """What was found, as flags, also after they were read."""
        return self.found if self.overflowed is None else (torch.full((1,), float(self.overflowed)),)

    @property
    def cleared(self) -> Sequence[Tensor]:
        """The tensors whose gradients overflowed, if 0 took their place."""
        return ()

    def agree(self, found: Tensor) -> None:
        """Go by what all ranks found from now on."""
        self._found = (found,)


def read_checks(checks: Sequence[OverflowCheck]) -> None:
    """Read those checks that nobody has read, with one synchronization of each device, and tell no scaler."""
    # Once each: several optimizers may have a check in common.
    unread = {id(check): (check, check.found) for check in checks if check.overflowed is None}.values()
    values = found_any([flag for _, flags in unread for flag in flags])
    for check, flags in unread:
        check.overflowed = any(values[: len(flags)])
        values = values[len(flags) :]


def _resolve(checks: Sequence[OverflowCheck]) -> OverflowCheck | None:
    """Read the checks of one step, tell every scaler among them once, and return the check to blame, if any.

    The first that overflowed is to blame, and its scaler goes lower. Those before it were clean. Those after it say
    nothing, as an inf stays in a gradient that is accumulated.
    """
    read_checks(checks)
    blamed = next((check for check in checks if check.overflowed), None)
    clean = list(checks if blamed is None else checks[: checks.index(blamed)])
    # Once: another optimizer of the block may have told the scaler, or of a later check of these gradients.
    if blamed is not None and not any(one.reported.overflowed for one in checks if one.scaler is blamed.scaler):
        blamed.scaler.update(True)
    for scaler in dict.fromkeys(check.scaler for check in clean):
        heard = any(check.reported.overflowed is not None for check in clean if check.scaler is scaler)
        if not heard and (blamed is None or scaler is not blamed.scaler):
            scaler.update(False)
    for check in checks:
        if check in clean or check.overflowed:
            check.reported.overflowed = bool(check.reported.overflowed) or check not in clean
    return blamed


def _resolve_on_device(checks: Sequence[OverflowCheck], tell: Callable[[bool], None]) -> Tensor | None:
    """Settle the checks of one step without reading them: the scaler moves on by a flag that stays on the device.

    Args:
        checks: In the order of the blocks, at least one.
        tell: Called with whether they overflowed, once that is known; it raises nothing.

    Returns:
        The flag, fp32 without dimensions, not 0 where any gradient overflowed. None where checks must be read, and
        nothing was done: some are read already, several scalers have a part in it, or the scaler lives on the host.
    """
    first = checks[0]
    scaler, is_reported = first.scaler, first.reported.overflowed is not None
    for check in checks:
        is_like_first = check.scaler is scaler and (check.reported.overflowed is not None) is is_reported
        if check.overflowed is not None or not check.is_complete or not is_like_first:
            return None
    found = [flag for check in checks for flag in check.found]
    if not found or not all(scaler.serves_device(flag.device) for flag in found):
        return None
    flags = [flag.to(found[0].device, non_blocking=True).view(()) for flag in found]
    flag = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
    (scaler.unread.add if is_reported else scaler.update_later)(flag, tell)
    for check in checks:
        # The device tells the scaler itself: another optimizer of the block has nothing to add.
        check.reported.overflowed = True
    return flag


class ScaledGrads:
    """The gradients of one optimizer, and their scale.

    Args:
        optimizer: Referred to weakly.
        masters: The masters that it steps in place of half parameters.

    Attributes:
        masters: As given.
        scale: The scale of all gradients now: 1.0 outside blocks but for ``delay_unscale``.
        delayed: The scaler of the block that has left the gradients scaled, if one has.
    """

    def __init__(self, optimizer: weakref.ref[Any], masters: MasterWeights | None) -> None:
        self.masters = masters
        self.scale: Scale = 1.0
        self._optimizer = optimizer
        self.delayed: LossScaler | None = None

    def params(self) -> Sequence[Tensor]:
        """Return the tensors whose gradients are scaled and unscaled: all that the optimizer steps."""
        return stepped_params(self._optimizer())

    def leaves(self) -> list[Tensor]:
        """Return the tensors whose gradients backward passes make: what the optimizer steps, and half parameters."""
        halves = [] if self.masters is None else [half for half, _ in self.masters.pairs]
        return [*halves, *self.params()]

    def has_any(self) -> bool:
        """Tell whether any gradient is there."""
        return any(param.grad is not None for param in self.params())

    def collect(self, *, new_pass: bool = False) -> None:
        """Let masters have the gradients that a backward pass left on half parameters; see `MasterWeights.collect`."""
        if self.masters is not None:
            self.masters.collect(new_pass=new_pass)

    def before_backward(self) -> None:
        """Get the gradients that are there ready for a backward pass; see `MasterWeights.before_backward`."""
        if self.masters is not None:
            self.masters.before_backward()


class PendingChecks:
    """The checks on an optimizer's gradients since its last step, and what other ranks say of them.

    Args:
        guard: Of the optimizer; it makes this object.
        grads: The optimizer's gradients.
        owner: That of the guard.

    Attributes:
        pending: The checks, in order.
        last: The scaler and scale of the last block or pass.
        resolved: The checks that were resolved last; none where there were none.
    """

    def __init__(self, guard: StepGuard, grads: ScaledGrads, owner: GuardOwner) -> None:
        self.pending: list[OverflowCheck] = []
        self.last: tuple[LossScaler, Scale] | None = None
        self.resolved: Sequence[OverflowCheck] = ()
        self._guard = weakref.ref(guard)
        self._grads = grads
        self._owner = owner
        # What the last block unscaled.
        self._unscaled: Sequence[Tensor] | None = None
        self._checked = CheckedGrads()
        # Flags of what the program had written to gradients before a block of several optimizers.
        self._before_block: Sequence[Tensor] = ()
        self._groups = SyncGroups()
        # Whether ranks agreed on all that was found since the step.
        self._agreed = False

    @property
    def group(self) -> SyncGroup | None:
        """The ranks that agree on each step; None where what this rank finds is what all find.

        To ask may be a collective the first time. UsageError: see `SyncGroups.among`.
        """
        guard = self._guard()
        if guard is None or not several_processes():
            return None
        return self._groups.among(self._grads.params(), self._owner.requested_group(guard))

    def note(self, check: OverflowCheck | None) -> None:
        """Take note of a check on the gradients as they are now."""
        if check is not None:
            self.pending.append(check)
            self.last, self._agreed = (check.scaler, check.scale), False

    def block_ended(self, scaler: LossScaler, scale: Scale) -> None:
        """Take note of what a block unscaled. Gradients of all other tensors have its scale still."""
        self._unscaled = self._grads.params()
        # All of them, anew: nothing stays of parameters that the optimizer steps no more.
        self._checked = CheckedGrads()
        self._checked.note(self._unscaled)
        self.last, self._agreed = (scaler, scale), False

    def note_checked(self, params: Iterable[Tensor]) -> None:
        """Take note that these gradients have no inf or nan but what a pending check tells of."""
        self._checked.note(params)

    def unchecked(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return those of these parameters whose gradients were never checked, or were written to since."""
        return self._checked.unchecked(params)

    @property
    def has_added_params(self) -> bool:
        """Whether the optimizer got parameters after the last block."""
        return self._unscaled is not None and len(self._grads.params()) != len(self._unscaled)

    def unscale_added_params(self) -> None:
        """Unscale and check the gradients of what was added to the optimizer after the last block.

        They are taken to be from that block. A gradient does not tell which backward pass made it, so one of a pass
        that was not scaled is divided too.
        """
        if self.last is None or self._unscaled is None or not self.has_added_params:
            return
        params, (scaler, scale) = self._grads.params(), self.last
        known = set(map(id, self._unscaled))
        self._unscaled = params
        added = [p for p in params if p.grad is not None and id(p) not in known]
        if added:
            self.note(OverflowCheck(scaler, scale, unscale_(added, scale, scaler.unread.blank)))
            self._checked.note(added)

    def finish_delayed(self) -> None:
        """Unscale and check what ``delay_unscale`` left scaled."""
        grads, scaler, scale = self._grads, self._grads.delayed, self._grads.scale
        if scaler is not None:
            grads.delayed, grads.scale = None, 1.0
            if grads.has_any():
                params = grads.params()
                self.note(OverflowCheck(scaler, scale, unscale_(params, scale, scaler.unread.blank)))
                self._checked.note(params)

    def expect(self, check: OverflowCheck) -> None:
        """Take note of a backward pass from which gradients come with true values, and of the check on them."""
        self.finish_delayed()
        self.resolve_dropped_grads()
        if len(self.pending) >= _MAX_PENDING_CHECKS:
            # Nobody steps.
            read_checks(self.pending)
            self.pending = [next((one for one in self.pending if one.overflowed), self.pending[-1])]
        self.note(check)

    def overflowed(self) -> bool | None:
        """Tell whether gradients since the last step overflowed, None where there are none. Waits for the device.

        Where ranks agree on a step all of them have to ask.
        """
        if not self._agreed:
            self.recheck()
        read_checks(self.pending)
        return any(check.overflowed for check in self.pending) if self.pending else None

    def earlier_flag(self, device: torch.device) -> Tensor:
        """Return a flag without dimensions on a device: not 0 where gradients may have held inf before a block.

        That is what pending checks say, or those of the last step without any, and `look_before_block`. Waits for
        nothing.
        """
        flags = [flag for check in self.pending or self.resolved for flag in check.flags]
        flags = [flag.to(device, non_blocking=True).view(()) for flag in (*flags, *self._before_block)]
        return torch.stack(flags).amax() if flags else torch.zeros((), device=device)

    def resolve(self) -> OverflowCheck | None:
        """Read the pending checks, tell the scalers, and return the check to blame, if any."""
        self.resolved, self.pending = self.pending, []
        blamed = _resolve(self.resolved)
        if blamed is not None:
            self._forget_checked()
        return blamed

    def resolve_dropped_grads(self) -> None:
        """Settle checks whose gradients the program dropped without a step: they skip none.

        Not where ranks agree on a step: another rank may have dropped nothing. There the next step is skipped.
        """
        if self.pending and not self._grads.has_any() and self.group is None:
            self.resolve()

    def resolve_on_device(self, skips: Skips) -> Tensor | None:
        """Settle the pending checks on their device and return the flag; None where they are to be read."""
        if not self.pending or self._owner.watch.wants_flags:
            return None
        scaler = self.pending[0].scaler
        skips.wait_by(scaler.unread)
        step = skips.step
        flag = _resolve_on_device(self.pending, lambda skipped: skips.tell(step, scaler, scaler.scale_before, skipped))
        if flag is not None:
            self.resolved, self.pending = self.pending, []
            step.unread = scaler.unread
            self._forget_checked()
        return flag

    def _forget_checked(self) -> None:
        """Forget which gradients were checked: after a skip inf and nan are in them, and no pending check tells."""
        self._checked = CheckedGrads()

    # -- several ranks --

    def step_ended(self) -> None:
        """Begin anew: ranks without a block or pass until the next step have to hear of those that have one."""
        self._agreed = False

    def recheck(self, *, makes_gradients: bool = False, last_step: Step | None = None) -> None:
        """Check those gradients that a step would use and that nobody checked as they are now.

        These are gradients that the program wrote to or replaced after their check, and all where other ranks have a
        part in them: torch does not count the writes of collectives. Ranks that find different things agree. Nothing
        waits for the device, unless the last step was a skip and no block followed.

        Args:
            makes_gradients: Whether the step is going to make gradients of its own, by a closure.
            last_step: The step before that which begins now, if one does.
        """
        guard, group = self._guard(), self.group
        params = self._grads.params()
        if not self.pending and not makes_gradients and self.last is not None and guard is not None:
            # These may be the gradients of a skipped step, or of a step that was taken. The scaler has heard of them.
            found = self._look(params if (last_step or guard.skips.step).skipped else self._checked.unchecked(params))
            if found:
                check = OverflowCheck(*self.last, found)
                check.reported.overflowed = True
                self.note(check)
        if group is not None:
            # Another rank may have scaled a loss where this one has scaled none yet.
            scalers = self._owner.scalers
            if self.last is not None or (scalers and scalers[0].checks):
                self.agree(group)
        elif self.pending:
            found = self._look(params if several_processes() else self._checked.unchecked(params))
            if found:
                last = self.pending[-1]
                self.pending.append(OverflowCheck(last.scaler, last.scale, found, earlier=last))

    def look_before_block(self) -> None:
        """Look at those gradients that nobody checked as they are before a block adds to them."""
        delayed = self._grads.delayed is not None
        self._before_block = () if delayed else self._look(self._checked.unchecked(self._grads.params()))

    def _look(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return flags that tell whether gradients, which are not scaled, have inf or nan."""
        flag = None if self.last is None else self.last[0].unread.blank
        found = unscale_(params, 1.0, flag)
        self._checked.note(params)
        return found

    def agree(
        self, group: SyncGroup, norm: Tensor | None = None, *, largest: bool = False, loss_is_nonfinite: bool = False
    ) -> FoundInfReduction:
        """Let all ranks know what each of them found, by one collective. Scalers are not updated yet."""
        params = self._grads.params()
        reduce_partial(params, halves_alone=True)
        scalers, own = self._owner.scalers, self.pending
        found: list[list[Tensor]] = [[] for _ in scalers]
        for check in own:
            found[_place_of(check.scaler, scalers)] += check.flags
        # A reduction by the program itself may have come since the block looked at them.
        now = self._look(self._checked.unchecked(params) if self._agreed else params)
        reduction = FoundInfReduction.of(
            group, found, now, has_checks=bool(own), loss_is_nonfinite=loss_is_nonfinite, norm=norm, largest=largest
        )
        self._agreed = True
        for check in own:
            check.overflowed = None
            check.agree(reduction.of_scaler(_place_of(check.scaler, scalers)))
        if own or reduction.has_checks():
            scaler, scale = self.last or (scalers[0], scalers[0].loss_scale)
            self.pending.append(OverflowCheck(scaler, scale, [reduction.now]))
        return reduction

    def norm(self, norm_type: float) -> Tensor:
        """Return the p-th power of the norm of the gradients of all ranks; for ``inf`` the norm itself.

        Where ranks agree on a step they do so by the same collective. What is written after it is agreed on at the
        step.
        """
        reduce_partial(self._grads.params(), halves_alone=False)
        group = self.group
        if group is None and not several_processes():
            self.recheck()
        present = [param for param in self._grads.params() if param.grad is not None]
        norm = powered_norm(present, group, norm_type)
        return norm if group is None else self.agree(group, norm, largest=norm_type == math.inf).norm

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Clip the gradients after `norm`. A norm that is finite keeps them finite, so they count as checked."""
        params = self._grads.params()
        clip_(params, norm, max_norm)
        if math.isfinite(max_norm):
            self._checked.note(params)


def _place_of(scaler: LossScaler, scalers: Sequence[LossScaler]) -> int:
    return next((place for place, one in enumerate(scalers) if one is scaler), 0)


class StepGuard:
    """Stands in front of one optimizer's ``step`` from `install` to `uninstall`.

    The optimizer is anything with ``param_groups`` and ``step``. It refers to the guard, and the guard refers to it
    weakly. A deep copy of the optimizer, or an unpickled one, is not guarded.

    Args:
        optimizer: What to guard.
        owner: Who made it.
        masters: The masters that it steps in place of half parameters. They take the gradients and what was written
            into half parameters before a step, and are copied into the half parameters after it.

    Attributes:
        grads: The optimizer's gradients.
        checks: The checks on them since the last step.
        skips: What is known of its steps and skips.
        in_block: Whether a block of this optimizer is open.
        stepping: Whether the optimizer is stepping now, as this guard lets it.
        last_step_ran: Whether the optimizer was called by the last ``step()``: where it got the flag of an overflow on
            its device it changed nothing if that was set.
        max_consecutive_skips: So many skips in a row are an error.
        repeats_closure: Whether the first evaluation of a closure may be repeated at a lower scale. Not where programs
            know nothing of loss scaling: a closure may draw its batch.
        scaled: Whether a block has had a loss of this optimizer.
        proven: Whether the scaled loss was run backward in one.
        compared_settings: Whether settings were compared with the ranks that step together with this one.
    """

    def __init__(self, optimizer: Any, owner: GuardOwner, *, masters: MasterWeights | None = None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._attached: weakref.ref[AttachedMethod] | None = None
        self.owner = owner
        self.grads = ScaledGrads(self._optimizer, masters)
        self.checks = PendingChecks(self, self.grads, owner)
        self.skips = Skips(type(optimizer).__name__, owner)
        self.in_block = self.stepping = False
        self.last_step_ran = self.repeats_closure = True
        self.max_consecutive_skips = 50
        self.scaled = self.proven = self.compared_settings = False

    @property
    def name(self) -> str:
        """The name of the optimizer's class."""
        return self.skips.name

    @property
    def masters(self) -> MasterWeights | None:
        """The masters that the optimizer steps."""
        return self.grads.masters

    @property
    def optimizer(self) -> Any:
        """The optimizer, None once it is gone."""
        return self._optimizer()

    @property
    def takes_flag(self) -> bool:
        """Whether the optimizer takes the flag of an overflow on its device."""
        optimizer = self.optimizer
        return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and _supports_found_inf(type(optimizer))

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
            self.checks.finish_delayed()
            self.checks.pending = []
            attached.detach()

    # -- blocks --

    def prepare_block(self, *, finishes_delayed: bool) -> None:
        """Get ready for a block: resolve what is known of gradients that were dropped since the last one."""
        self.grads.collect(new_pass=True)
        self.checks.unscale_added_params()
        self.checks.resolve_dropped_grads()
        if finishes_delayed or not self.grads.has_any():
            self.checks.finish_delayed()

    def leave_block(self, scale: Scale, check: OverflowCheck | None = None, delayed: LossScaler | None = None) -> None:
        """Take note of how a block ended.

        Args:
            scale: The scale of the gradients now.
            check: What was found in them, if they were checked.
            delayed: The scaler of the block, if they are to be checked later.
        """
        self.grads.scale, self.grads.delayed = scale, delayed
        self.checks.note(check)

    # -- clipping --

    def norm(self, norm_type: float) -> Tensor:
        """Return the power of the norm of true gradients that `PendingChecks.norm` does."""
        self.grads.collect()
        self.checks.finish_delayed()
        self.checks.unscale_added_params()
        return self.checks.norm(norm_type)

    def overflowed(self) -> bool:
        """Tell whether gradients since the last step overflowed; where there are none, whether that step was a skip."""
        found = self.checks.overflowed()
        return self.skips.step.skipped if found is None else found

    # -- steps --

    def step(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step or skip: what ``optimizer.step(*args, **kwargs)`` does, where ``original`` does it without a guard.

        Raises:
            UsageError: A block of this optimizer is open.
            NonFiniteGradientsError: There were too many skips in a row.
        """
        if self.in_block:
            raise UsageError(
                f"{self.name}.step() was called inside its scale_loss block, where gradients are still multiplied by "
                f"{float(self.grads.scale):g}; move optimizer.step() after the with block"
            )
        closure = args[0] if args else kwargs.get("closure")
        self._prepare_step(makes_gradients=callable(closure))
        try:
            if callable(closure):
                result = _step_with_closure(self, closure, original, args, kwargs)
            else:
                result = self._step_by_checks(original, args, kwargs)
        finally:
            self.checks.step_ended()
            self.params_changed()
        self.owner.step_ended(self)
        return result

    def _step_by_checks(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flag = self._flag_for_device()
        if flag is None:
            blamed = self.checks.resolve()
            if blamed is not None or self.owner.wants_skip(self):
                return self.skip(blamed)
            return self.take(original, args, kwargs)
        optimizer, known = self.optimizer, _state_size(self)
        optimizer.found_inf = flag
        try:
            result = self._call(original, args, kwargs)
        finally:
            del optimizer.found_inf
        if _state_size(self) != known and bool(flag):
            # torch.optim.SGD(fused=True) would take the momentum that it has allocated here for that of a step.
            _forget_state(self, known)
        return result

    def _prepare_step(self, *, makes_gradients: bool) -> None:
        last_step = self.skips.step
        self.skips.begin()
        self.owner.step_begins(self)
        self.last_step_ran = True
        if not makes_gradients:
            self.owner.refuse_scaled(self)
        self.grads.collect()
        self.checks.finish_delayed()
        self.checks.unscale_added_params()
        self.checks.recheck(makes_gradients=makes_gradients, last_step=last_step)

    def params_changed(self) -> None:
        """Bring up to date what follows from the parameters, which a step may have changed."""
        casts = self.owner.casts
        if casts is not None:
            casts.cache.clear()
        # An optimizer that skipped by itself left the masters as they were, and so are the halves after this.
        if self.masters is not None and self.last_step_ran:
            self.masters.copy_down()

    def _flag_for_device(self) -> Tensor | None:
        """Return the flag of an overflow that the optimizer takes on its device; None where checks are to be read.

        The convention is that of `torch.amp.GradScaler`. Not where the step has hooks, which would run in a skipped one
        too, nor where the program has given a flag itself.
        """
        optimizer = self.optimizer
        if (
            not self.takes_flag
            or getattr(optimizer, "found_inf", None) is not None
            or getattr(optimizer, "_optimizer_step_pre_hooks", None)
            or getattr(optimizer, "_optimizer_step_post_hooks", None)
        ):
            return None
        scaler = self.checks.pending[0].scaler if self.checks.pending else None
        flag = self.checks.resolve_on_device(self.skips)
        if flag is not None and scaler is not None and self.skips.in_a_row_known >= self.max_consecutive_skips:
            raise self._too_many_skips(scaler)
        return flag

    def take(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the optimizer step, with casts off."""
        result = self._call(original, args, kwargs)
        self.skips.count(False)
        return result

    def begin_masters(self) -> None:
        """Let the masters take what was written into half parameters; once that is done this changes nothing."""
        if self.masters is not None:
            asked = self.owner.requested_group(self)
            self.masters.begin_step(local=asked is not None and asked.replicas == 1)

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self.stepping = self.stepping, True
        try:
            self.begin_masters()
            casts = self.owner.casts
            return (original if casts is None else casts.local.bound(original, False))(*args, **kwargs)
        finally:
            self.stepping = before

    def skip(self, blamed: OverflowCheck | None) -> Any:
        """Count a skipped step; None for one that the owner wanted, and has counted.

        Raises:
            NonFiniteGradientsError: There were too many in a row.
        """
        self.last_step_ran = False
        # A step was due and came: LR schedulers look at this before they complain about the order of calls.
        self.optimizer._opt_called = True
        if blamed is None:
            self.skips.step.skipped = True
            return
        self.skips.count(True, blamed.scaler, float(blamed.scale))
        if self.skips.in_a_row >= self.max_consecutive_skips:
            raise self._too_many_skips(blamed.scaler, blamed.cleared)

    def _too_many_skips(self, scaler: LossScaler, cleared: Sequence[Tensor] = ()) -> NonFiniteGradientsError:
        known = {id(param) for param in cleared}
        named = [(name, param.grad) for name, param in named_params(self.optimizer) if param.grad is not None]
        found = [name for name, param in named_params(self.optimizer) if id(param) in known] or non_finite(named)
        gone = "gradients that are gone by now" + (", or on another rank" if several_processes() else "")
        explained = self.skips.explanation
        return NonFiniteGradientsError(
            f"{self.skips.in_a_row} steps of {self.name} in a row were skipped for inf or nan in the gradients, "
            f"first in {', '.join(found) or gone}; the loss scale is {scaler.loss_scale:g}. Look for "
            "inf or nan in the data and the loss, for too high a learning rate, for ops that need fp32. "
            f"max_consecutive_skips={self.max_consecutive_skips} is the limit"
            + ("" if explained is None else f". The last of them: {explained}"),
            overflow=explained,
        )


# -- closures --


class _TrainingFailed(BaseException):
    """Leaves an optimizer's step from within its closure."""

    def __init__(self, loss: Any, blamed: OverflowCheck | None) -> None:
        super().__init__()
        self.loss = loss
        self.blamed = blamed


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
    guard.checks.resolve_dropped_grads()
    blamed = guard.checks.resolve()
    if blamed is not None:
        guard.skip(blamed)
        return None if guard.repeats_closure else _call_closure(guard, closure)
    guard.begin_masters()
    undo = StepCopy(guard.optimizer) if guard.owner.undoes_steps else None
    versions, begun = _versions_of(guard.grads.params()), False

    def evaluate() -> Any:
        nonlocal begun
        first, begun = not begun and versions == _versions_of(guard.grads.params()), True
        guard.params_changed()
        loss, blamed = _evaluate(guard, closure, 1 if first and not guard.repeats_closure else _MAX_EVALUATIONS)
        if blamed is None and not guard.owner.wants_skip(guard):
            return loss
        if first or undo is not None or blamed is None:
            raise _TrainingFailed(loss, blamed)
        raise NonFiniteGradientsError(
            f"gradients overflowed at loss scale {float(blamed.scale):g} when {guard.name} called its closure in the "
            "middle of a step, and no lower scale is allowed or helps. The parameters are at an intermediate point: "
            "load the last checkpoint, and train with a lower static loss scale, bf16 or fp32"
        )

    known = _state_size(guard)
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
        _forget_state(guard, known)
        guard.skip(given_up.blamed)
        return given_up.loss


def _state_size(guard: StepGuard) -> int:
    """Return the number of parameters for which the optimizer has a state."""
    state = getattr(guard.optimizer, "state", None)
    return len(state) if isinstance(state, Mapping) else 0


def _forget_state(guard: StepGuard, known: int) -> None:
    """Drop the states that the optimizer has made since it had so many: a skipped step leaves none."""
    state: Any = getattr(guard.optimizer, "state", None)
    for key in list(state)[known:] if isinstance(state, Mapping) else ():
        del state[key]


def _call_closure(guard: StepGuard, closure: Callable[[], Any]) -> Any:
    """Call a closure as outside of a step."""
    casts = guard.owner.casts
    with contextlib.nullcontext() if casts is None else casts.evaluating(), torch.enable_grad():
        return closure()


def _evaluate(guard: StepGuard, closure: Callable[[], Any], attempts: int) -> tuple[Any, OverflowCheck | None]:
    """Evaluate a closure, at lower scales if it overflows. Returns its loss, and the check left to blame."""
    grads, checks = guard.grads, guard.checks
    if guard.skips.steps > 1 and checks.last is None:
        # The steps before scaled no loss, so gradients are not copied. If this one does, its first overflow is a skip.
        attempts = 1
    may_repeat = attempts > 1 and any(scaler.checks for scaler in guard.owner.scalers)
    before = _GradsBefore(grads.params()) if may_repeat else None
    for attempt in range(attempts):
        if attempt and before is not None:
            # The closure may leave zero_grad() to the lines before the step, or add to the gradients of other losses.
            before.restore(grads.params())
        loss = _call_closure(guard, closure)
        guard.owner.refuse_scaled(guard)
        grads.collect()
        checks.finish_delayed()
        loss_is_nonfinite = not _is_finite(loss)
        if (group := checks.group) is not None:
            loss_is_nonfinite = checks.agree(group, loss_is_nonfinite=loss_is_nonfinite).loss_is_nonfinite()
        else:
            checks.recheck(makes_gradients=True)
        # A pass may have had a lower scale than its scaler, which tells whether there is a lower one.
        scales = {id(check.scaler): check.scaler.loss_scale for check in checks.pending}
        blamed = checks.resolve()
        # A lower scale helps against large gradients, not against a loss that is inf already.
        if blamed is None or loss_is_nonfinite or blamed.scaler.loss_scale >= scales[id(blamed.scaler)]:
            break
    return loss, blamed


class _GradsBefore:
    """The gradients that were there before a closure was evaluated, with their values."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._of = [(param, param.grad, param.grad.detach().clone()) for param in params if param.grad is not None]

    @torch.no_grad()
    def restore(self, params: Iterable[Tensor]) -> None:
        """Give all parameters what they had."""
        for param in params:
            param.grad = None
        for param, grad, value in self._of:
            grad.copy_(value)
            param.grad = grad


def _is_finite(loss: Any) -> bool:
    if isinstance(loss, Tensor):
        return bool(loss.detach().isfinite().all())
    return not isinstance(loss, float) or math.isfinite(loss)


def _versions_of(params: Iterable[Tensor]) -> list[int | None]:
    return [version_of(param) for param in params]


# -- settings --


def _supports_found_inf(kind: type[Any]) -> bool:
    """Tell whether a class that says it takes the flag of an overflow changes nothing in a step where that is set.

    Not one that wants a whole `GradScaler`, by an older convention. Nor a subclass with a step of its own that inherits
    ``_step_supports_amp_scaling`` from a class of torch: what its step does besides calling that one, it would do in a
    skipped step too.
    """
    step = getattr(kind, "step", None)
    # Torch wraps the step of each class; the wrapper has the module of what it wraps.
    module = getattr(step, "__module__", None) or ""
    if module.startswith("torch.optim."):
        return True
    own = [base for base in kind.__mro__ if base.__module__ == module and "_step_supports_amp_scaling" in vars(base)]
    return bool(own) and callable(step) and "grad_scaler" not in inspect.signature(step).parameters
