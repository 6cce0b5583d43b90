"""What ``optimizer.step()`` must do next: step, skip, or call its closure again at a lower loss scale.

A `StepGuard` stands in front of one optimizer. Blocks and backward passes of its losses leave an `OverflowCheck` with
its `GradChecks`, whose flags stay on the device. ``optimizer.step()`` reads the flags of all checks since the last
step at once, tells each loss scaler once of all its blocks, and steps or skips. An optimizer that takes the flag of an
overflow on its device, as torch's fused ones do for `torch.amp.GradScaler`, gets it there: nobody waits for the device,
and the guard hears later whether that was a skip.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.core.attach import AttachedMethod, named_params, stepped_params, takes_flag
from autoamp.core.closures import forget_state, state_size, step_with_closure
from autoamp.core.gradients import (
    found_any,
    is_sharded,
    local_of,
    marks_of,
    non_finite,
    several_processes,
    total_norm,
    unchecked,
    unscale_,
)
from autoamp.core.loss_scale import LossScaler, Scale
from autoamp.core.masters import MasterWeights
from autoamp.core.ranks import (
    FoundInfReduction,
    RequestedGroup,
    SyncGroup,
    clip_,
    meshes_of,
    powered_norm,
    reduce_found_inf,
    reduce_partial,
    sync_group,
)
from autoamp.core.steps import GuardHost, Step, StepHistory
from autoamp.errors import NonFiniteGradientsError, UsageError

# At most so many checks wait for a step. Then they are read, and one that overflowed is left.
_MAX_PENDING_CHECKS = 64


class _ScalerHeard:
    """The result of a block or pass that its scaler has heard: None for none yet, else whether gradients overflowed."""

    overflow: bool | None = None


class OverflowCheck:
    """What one scaled block or backward pass found in the gradients, read or still on the device.

    Optimizers that share a block share its check: the scaler hears of the block once.

    Args:
        scaler: The scaler of the block.
        scale: The scale of the block.
        found: What `autoamp.core.unscale_` returned, and other tensors like these.
        earlier: An earlier check of the same block or pass, if there is one: the scaler hears of it once.
        running: The `ScaledPass`, if it runs still: ``found`` grows as gradients arrive, and what arrives after it was
            read is for another check.

    Attributes:
        scaler, scale, running: As given.
        scaler_heard: The result that the scaler has heard.
        overflowed: Whether an inf or nan was there; None as long as nobody has read it.
        is_complete: Whether nothing more is going to be found. Then a step may leave it unread.
        found: The flags that are to be read; none once they were.
    """

    def __init__(
        self,
        scaler: LossScaler,
        scale: Scale,
        found: Sequence[Tensor],
        earlier: OverflowCheck | None = None,
        running: Any = None,
    ) -> None:
        self.scaler = scaler
        self.scale = scale
        self.scaler_heard: _ScalerHeard = _ScalerHeard() if earlier is None else earlier.scaler_heard
        self.overflowed: bool | None = None
        self.is_complete = running is None
        self.found, self.running = found, running

    @property
    def cleared(self) -> Sequence[Tensor]:
        """The tensors whose gradients overflowed, if 0 took their place. Waits for the device."""
        return () if self.running is None else self.running.cleared()

    def agree(self, found: Tensor) -> None:
        """Go by what all ranks found from now on."""
        self.overflowed, self.found = None, (found,)


def read_checks(checks: Sequence[OverflowCheck]) -> None:
    """Read those checks that nobody has read, with one synchronization of each device, and tell no scaler."""
    # Once each: several optimizers may have a check in common.
    unread = {id(check): (check, check.found) for check in checks if check.overflowed is None}.values()
    values = found_any([flag for _, flags in unread for flag in flags])
    for check, flags in unread:
        check.overflowed, check.found = any(values[: len(flags)]), ()
        values = values[len(flags) :]


class GradChecks:
    """The gradients of one optimizer: their scale, the checks on them since its last step, and what other ranks found.

    Args:
        optimizer: Referred to weakly.
        masters: The masters that it steps in place of half parameters.
        history: What is known of its steps.
        owner: Returns that of its guard.

    Attributes:
        masters: As given.
        scale: The scale of all gradients now: 1.0 outside blocks but for ``delay_unscale``.
        delayed: The scaler of the block that has left the gradients scaled, if one has.
        own_scalers: The loss scalers of an optimizer that scales its loss itself; none where the owner's do.
        asked: The process group that was asked for, for this optimizer alone.
        checks: The checks, in order.
        last: The scaler and scale of the last block or pass.
        resolved: The checks that were resolved last; none where there were none.
        checked: The marks of gradients that have no inf or nan but what a pending check tells of.
        agreed: Whether ranks agreed on all that was found since the step. Begun anew at each step: ranks without a
            block or pass until the next one have to hear of those that have one.
    """

    def __init__(
        self, optimizer: Any, masters: MasterWeights | None, history: StepHistory, owner: Callable[[], GuardHost[Any]]
    ) -> None:
        self.masters = masters
        self.scale: Scale = 1.0
        self.delayed: LossScaler | None = None
        self.own_scalers: Sequence[LossScaler] = ()
        self.asked: RequestedGroup | None = None
        self.checks: list[OverflowCheck] = []
        self.last: tuple[LossScaler, Scale] | None = None
        self.resolved: Sequence[OverflowCheck] = ()
        self.checked: dict[int, Any] = {}
        self.agreed = False
        self._optimizer = weakref.ref(optimizer)
        self._history, self._owner = history, owner
        # What the last block unscaled.
        self._unscaled: Sequence[Tensor] | None = None
        # Who agrees on steps, with the meshes and the request that it was found for.
        self._known: tuple[list[Any], RequestedGroup | None, SyncGroup | None] | None = None

    def params(self) -> Sequence[Tensor]:
        """Return the tensors whose gradients are scaled and unscaled: all that the optimizer steps."""
        return stepped_params(self._optimizer())

    def leaves(self) -> list[Tensor]:
        """Return the tensors whose gradients backward passes make: what the optimizer steps, and half parameters."""
        halves = [] if self.masters is None else [half for half, _ in self.masters.pairs]
        return [*halves, *self.params()]

    def has_any(self) -> bool:
        """Whether any gradient is there."""
        return any(param.grad is not None for param in self.params())

    def collect(self, *, new_pass: bool = False) -> None:
        """Let masters have the gradients that a backward pass left on half parameters; see `MasterWeights.collect`."""
        if self.masters is not None:
            self.masters.collect(new_pass=new_pass)

    @property
    def scalers(self) -> Sequence[LossScaler]:
        """All loss scalers of the optimizer, in the same order on all ranks."""
        return self.own_scalers or self._owner().scalers

    @property
    def requested_group(self) -> RequestedGroup | None:
        """The process group over which the program wants steps to be agreed on, if it asked for one."""
        return self.asked or self._owner().requested_group(self._optimizer())

    @property
    def group(self) -> SyncGroup | None:
        """The ranks that agree on each step; None where what this rank finds is what all find.

        To ask may be a collective the first time. UsageError: see `sync_group`.
        """
        if not several_processes():
            return None
        params, asked = self.params(), self.requested_group
        meshes = meshes_of(params)
        if self._known is None or self._known[:2] != (meshes, asked):
            self._known = meshes, asked, sync_group(params, meshes, asked)
        return self._known[2]

    def note(self, check: OverflowCheck) -> None:
        """Take note of a check on the gradients as they are now."""
        self.checks.append(check)
        self.last, self.agreed = (check.scaler, check.scale), False

    def block_ended(self, check: OverflowCheck, *, is_concerned: bool) -> None:
        """Take note of what a block unscaled, and keep its check if that concerns the optimizer."""
        self._unscaled = self.params()
        # All of them, anew: nothing stays of parameters that the optimizer steps no more.
        self.checked = marks_of(self._unscaled)
        self.last, self.agreed = (check.scaler, check.scale), False
        if is_concerned:
            self.checks.append(check)

    def added_params(self) -> list[Tensor]:
        """Return the parameters that the optimizer got after the last block."""
        params = self.params()
        if self._unscaled is None or len(params) == len(self._unscaled):
            return []
        known = set(map(id, self._unscaled))
        return [param for param in params if id(param) not in known]

    def finish_delayed(self, done: set[int] | None = None) -> None:
        """Unscale and check what ``delay_unscale`` left scaled, or what was added after the last block.

        Gradients of what was added are taken to be from that block. A gradient does not tell which backward pass made
        it, so one of a pass that was not scaled is divided too. Parameters that are in ``done``, by id, are left out.
        """
        if self.delayed is None and self.last is None:
            return
        params = self.params()
        if self.delayed is not None:
            scaler, scale, scaled = self.delayed, self.scale, params
            self.delayed, self.scale = None, 1.0
        elif self.last is not None and (scaled := self.added_params()):
            scaler, scale = self.last
        else:
            return
        self._unscaled, done = params, set() if done is None else done
        scaled = [param for param in scaled if id(param) not in done]
        done.update(map(id, scaled))
        if any(param.grad is not None for param in scaled):
            self.note(OverflowCheck(scaler, scale, unscale_(scaled, scale, scaler.unread.blank)))
            self.checked |= marks_of(scaled)

    def expect(self, check: OverflowCheck) -> None:
        """Take note of a backward pass from which gradients come with true values, and of the check on them."""
        self.finish_delayed()
        self.resolve_dropped_grads()
        if len(self.checks) >= _MAX_PENDING_CHECKS:
            # Nobody steps.
            read_checks(self.checks)
            self.checks = [next((one for one in self.checks if one.overflowed), self.checks[-1])]
        self.note(check)

    def overflowed(self) -> bool:
        """Whether gradients since the last step overflowed; where there are none, whether that step was a skip.

        Waits for the device. Where ranks agree on a step all of them have to ask.
        """
        if not self.agreed:
            self.recheck()
        read_checks(self.checks)
        return any(check.overflowed for check in self.checks) if self.checks else self._history.step.skipped

    def resolve(self) -> OverflowCheck | None:
        """Read the pending checks, tell every scaler among them once, and return the check to blame, if any.

        The first that overflowed is to blame, and its scaler goes lower. Those before it were clean. Those after it say
        nothing, as an inf stays in a gradient that is accumulated.
        """
        if not self.checks:
            self.resolved = ()
            return None
        self.resolved, self.checks = self.checks, []
        checks = self.resolved
        read_checks(checks)
        blamed = next((check for check in checks if check.overflowed), None)
        clean = list(checks if blamed is None else checks[: checks.index(blamed)])
        # Once: another optimizer of the block may have told the scaler, or of a later check of these gradients. One
        # that told of no overflow does not count: its gradients of the block were finite, these are not.
        if blamed is not None and not any(one.scaler_heard.overflow for one in checks if one.scaler is blamed.scaler):
            blamed.scaler.update(True)
        for scaler in dict.fromkeys(check.scaler for check in clean):
            heard = any(check.scaler_heard.overflow is not None for check in clean if check.scaler is scaler)
            if not heard and (blamed is None or scaler is not blamed.scaler):
                scaler.update(False)
        for check in checks:
            check.scaler.last_found_inf = blamed is not None and check.scaler is blamed.scaler
            if check in clean or check.overflowed:
                check.scaler_heard.overflow = bool(check.scaler_heard.overflow) or check not in clean
        if blamed is not None:
            # Inf and nan are in them from now on, and no pending check tells.
            self.checked = {}
        return blamed

    def resolve_dropped_grads(self) -> None:
        """Settle checks whose gradients the program dropped, or set to 0, without a step: they skip none.

        Not where ranks agree on a step: another rank may have dropped nothing. There the next step is skipped.
        """
        if self.checks and (not self.has_any() or self._are_zeroed()) and self.group is None:
            self.resolve()

    def _are_zeroed(self) -> bool:
        """Whether the program wrote to all gradients since their check, and all are 0. Waits for the device then."""
        present = [param for param in self.params() if param.grad is not None]
        # Other ranks may have no zeros, and a pass that cleans has put 0 in place of inf itself.
        is_shared = several_processes() and (self.requested_group is not None or any(map(is_sharded, present)))
        if is_shared or any(check.running is not None for check in self.checks):
            return False
        if len(unchecked(present, self.checked)) < len(present):
            return False
        return not bool(total_norm([local_of(param.grad) for param in present if param.grad is not None], math.inf))

    def resolve_on_device(self) -> Tensor | None:
        """Settle the pending checks without reading them: the scaler moves on by a flag that stays on the device.

        Returns:
            The flag, fp32 without dimensions, not 0 where any gradient overflowed. None where checks must be read, and
            nothing was done: there are none, some are read already, several scalers have a part in them, the scaler
            lives on the host, or the host is to know at once.
        """
        if not self.checks or self._owner().steps.reads_flags:
            return None
        scaler, is_reported = self.checks[0].scaler, self.checks[0].scaler_heard.overflow is not None
        for check in self.checks:
            is_like_first = check.scaler is scaler and (check.scaler_heard.overflow is not None) is is_reported
            if check.overflowed is not None or not check.is_complete or not is_like_first:
                return None
        found = [flag for check in self.checks for flag in check.found]
        if not found or not all(scaler.serves_device(flag.device) for flag in found):
            return None
        flags = [flag.to(found[0].device, non_blocking=True).view(()) for flag in found]
        flag = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        history, step = self._history, self._history.step

        def tell(skipped: bool) -> None:
            history.end(step, scaler if skipped else None, scaler.scale_before, late=True)

        if step.unread is not scaler.unread:
            # Steps are counted in order, so those before are waited for.
            history.catch_up()
            step.unread = scaler.unread
        (scaler.unread.add if is_reported else scaler.update_later)(flag, tell)
        for check in self.checks:
            # The device tells the scaler itself: another optimizer of the block has nothing to add.
            check.scaler_heard.overflow = True
        self.resolved, self.checks = self.checks, []
        self.checked = {}
        return flag

    # -- several ranks --

    def recheck(self, *, makes_gradients: bool = False, last_step: Step | None = None) -> None:
        """Check those gradients that a step would use and that nobody checked as they are now.

        These are gradients that the program wrote to or replaced after their check, and all where other ranks have a
        part in them: torch does not count the writes of collectives. Ranks that find different things agree. Nothing
        waits for the device, unless the last step was a skip and no block followed.

        Args:
            makes_gradients: Whether the step is going to make gradients of its own, by a closure.
            last_step: The step before that which begins now, if one does.
        """
        group = self.group
        params = self.params()
        if not self.checks and not makes_gradients and self.last is not None:
            # These may be the gradients of a skipped step, or of a step that was taken. The scaler has heard of them.
            found = self._look(params if (last_step or self._history.step).skipped else unchecked(params, self.checked))
            if found:
                check = OverflowCheck(*self.last, found)
                check.scaler_heard.overflow = True
                self.note(check)
        if group is not None:
            # Another rank may have scaled a loss where this one has scaled none yet.
            scalers = self.scalers
            if self.last is not None or (scalers and scalers[0].checks):
                self.agree(group)
        elif self.checks:
            pending = params if several_processes() else unchecked(params, self.checked)
            if pending and (found := self._look(pending)):
                last = self.checks[-1]
                self.checks.append(OverflowCheck(last.scaler, last.scale, found, earlier=last))

    def _look(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return flags that tell whether gradients, which are not scaled, have inf or nan."""
        if not params:
            return []
        found = unscale_(params, 1.0, None if self.last is None else self.last[0].unread.blank)
        self.checked |= marks_of(params)
        return found

    def agree(
        self, group: SyncGroup, norm: Tensor | None = None, *, largest: bool = False, loss_is_nonfinite: bool = False
    ) -> FoundInfReduction:
        """Let all ranks know what each of them found, by one collective. Scalers are not updated yet."""
        params = self.params()
        reduce_partial(params, halves_alone=True)
        scalers, own = self.scalers, self.checks
        found: list[list[Tensor]] = [[] for _ in scalers]
        for check in own:
            # One that was read is a flag again.
            flags = check.found if check.overflowed is None else [torch.full((1,), float(check.overflowed))]
            found[_place_of(check.scaler, scalers)] += flags
        # A reduction by the program itself may have come since the block looked at them.
        now = self._look(unchecked(params, self.checked) if self.agreed else params)
        reduction = reduce_found_inf(
            group, found, now, has_checks=bool(own), loss_is_nonfinite=loss_is_nonfinite, norm=norm, largest=largest
        )
        self.agreed = True
        for check in own:
            check.agree(reduction.of_scalers[_place_of(check.scaler, scalers)])
        if own or reduction.has_checks:
            scaler, scale = self.last or (scalers[0], scalers[0].loss_scale)
            self.checks.append(OverflowCheck(scaler, scale, [reduction.now]))
        return reduction

    def norm(self, norm_type: float) -> Tensor:
        """Return the p-th power of the norm of the gradients of all ranks; for ``inf`` the norm itself.

        Where ranks agree on a step they do so by the same collective. What is written after it is agreed on at the
        step.
        """
        reduce_partial(self.params(), halves_alone=False)
        group = self.group
        if group is None and not several_processes():
            self.recheck()
        present = [param for param in self.params() if param.grad is not None]
        norm = powered_norm(present, group, norm_type)
        return norm if group is None else self.agree(group, norm, largest=norm_type == math.inf).norm

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Clip the gradients after `norm`. A norm that is finite keeps them finite, so they count as checked."""
        params = self.params()
        clip_(params, norm, max_norm)
        if math.isfinite(max_norm):
            self.checked |= marks_of(params)


def _place_of(scaler: LossScaler, scalers: Sequence[LossScaler]) -> int:
    return next((place for place, one in enumerate(scalers) if one is scaler), 0)


class StepGuard:
    """Stands in front of one optimizer's ``step`` until `uninstall`.

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
        history: What is known of its steps and skips.
        in_block: Whether a block of this optimizer is open.
        stepping: Whether the optimizer is stepping now, as this guard lets it.
        repeats_closure: Whether the first evaluation of a closure may be repeated at a lower scale. Not where programs
            know nothing of loss scaling: a closure may draw its batch.
        scaled: Whether a block has had a loss of this optimizer.
        backward_seen: Whether the scaled loss was run backward in one.
        compared_settings: Whether settings were compared with the ranks that step together with this one.
    """

    def __init__(
        self, optimizer: Any, owner: Callable[[], GuardHost[StepGuard]], *, masters: MasterWeights | None = None
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.owner = owner
        self.name, self.masters = type(optimizer).__name__, masters
        self.history = StepHistory(self.name, owner)
        self.grads = GradChecks(optimizer, masters, self.history, owner)
        self.in_block = self.stepping = False
        self.repeats_closure = True
        self.scaled = self.backward_seen = self.compared_settings = False
        # The optimizer refers to the attached step, and that to the guard: no cycle, and all go with the optimizer.
        self._attached = weakref.ref(AttachedMethod(optimizer, "step", self.step))

    @property
    def optimizer(self) -> Any:
        """The optimizer, None once it is gone."""
        return self._optimizer()

    def uninstall(self) -> None:
        """Put back the step that was there; under a wrapper that somebody layered above, let all calls pass.

        Pending checks are dropped; gradients that ``delay_unscale`` left scaled get their true values.
        """
        attached = self._attached()
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
            in_hook = "; if a hook steps in the backward pass, call handle.auto_scale() once and leave scale_loss out"
            raise UsageError(
                f"{self.name}.step() was called inside its scale_loss block, before gradients are divided by the loss "
                f"scale {float(self.grads.scale):g} and checked; move optimizer.step() after the with block"
                + (in_hook if self.masters is None else "")
            )
        closure: Any = args[0] if args else kwargs.get("closure")
        evaluates, owner, grads, last_step = callable(closure), self.owner(), self.grads, self.history.step
        counts = not (owner.running and owner.steps_within(self.optimizer))
        self.history.begin()
        owner.step_begins(self, counts=counts)
        if not evaluates:
            owner.refuse_scaled(self)
        grads.collect()
        grads.finish_delayed()
        grads.recheck(makes_gradients=evaluates, last_step=last_step)
        try:
            if evaluates:
                result = step_with_closure(self, closure, original, args, kwargs)
            elif (flag := self._flag_for_device()) is not None:
                result = self._step_by_flag(flag, original, args, kwargs)
            elif (blamed := grads.resolve()) is not None or self.is_refused():
                result = self.skip(blamed)
            else:
                result = self.take(original, args, kwargs)
        finally:
            grads.agreed = False
            self.params_changed()
        if counts:
            owner.steps.end(self.history.step)
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

    def _step_by_flag(
        self, flag: Tensor, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Let an optimizer step or skip by itself, as a flag on its device tells it."""
        optimizer = self.optimizer
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
        if self.masters is not None and self.history.step.skipped_by is None:
            self.masters.round_into_model()

    def _flag_for_device(self) -> Tensor | None:
        """Return the flag of an overflow that the optimizer takes on its device; None where checks are to be read.

        The convention is that of `torch.amp.GradScaler`. Not where the step has hooks, which would run in a skipped one
        too, nor where the program has given a flag itself.
        """
        optimizer = self.optimizer
        if (
            not takes_flag(optimizer)
            or getattr(optimizer, "found_inf", None) is not None
            or getattr(optimizer, "_optimizer_step_pre_hooks", None)
            or getattr(optimizer, "_optimizer_step_post_hooks", None)
        ):
            return None
        flag = self.grads.resolve_on_device()
        if flag is not None and self.history.in_a_row >= self.owner().max_consecutive_skips:
            raise self._too_many_skips(self.grads.resolved[0].scaler)
        return flag

    def take(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the optimizer step, with casts off."""
        result = self._call(original, args, kwargs)
        self.history.end(self.history.step)
        return result

    def begin_masters(self) -> None:
        """Let the masters take what was written into half parameters; once that is done this changes nothing."""
        if self.masters is not None:
            asked = self.grads.requested_group
            self.masters.refresh(first_step=True, local=asked is not None and asked.replicas == 1)

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, key = self.owner(), id(self.optimizer)
        self.stepping = True
        owner.running[key] = threading.get_ident(), self.optimizer
        try:
            self.begin_masters()
            casts = owner.casts
            return (original if casts is None else casts.thread.with_mode(original, False))(*args, **kwargs)
        finally:
            owner.running.pop(key, None)
            self.stepping = False

    def skip(self, blamed: OverflowCheck | None) -> Any:
        """Count a skipped step; None for one that ``on_nonfinite`` has refused, and counted.

        Raises:
            NonFiniteGradientsError: There were too many in a row.
        """
        # A step was due and came: LR schedulers look at this before they complain about the order of calls.
        self.optimizer._opt_called = True
        if blamed is None:
            self.history.step.skipped_by = "on_nonfinite"
            return
        self.history.end(self.history.step, blamed.scaler, float(blamed.scale))
        if self.history.in_a_row >= self.owner().max_consecutive_skips:
            raise self._too_many_skips(blamed.scaler, blamed.cleared)

    def _too_many_skips(self, scaler: LossScaler, cleared: Sequence[Tensor] = ()) -> NonFiniteGradientsError:
        known = {id(param) for param in cleared}
        named = [(name, param.grad) for name, param in named_params(self.optimizer) if param.grad is not None]
        found = [name for name, param in named_params(self.optimizer) if id(param) in known] or non_finite(named)
        gone = "gradients that are gone by now" + (", or on another rank" if several_processes() else "")
        explained = self.history.step.explanation
        return NonFiniteGradientsError(
            f"{self.history.in_a_row} steps of {self.name} in a row were skipped for inf or nan in the gradients, "
            f"first in {', '.join(found) or gone}; the loss scale is {scaler.loss_scale:g}. Look for "
            "inf or nan in the data and the loss, for too high a learning rate, for ops that need fp32. "
            f"max_consecutive_skips={self.owner().max_consecutive_skips} is the limit"
            + ("" if explained is None else f". The last of them: {explained}"),
            overflow=explained,
        )
