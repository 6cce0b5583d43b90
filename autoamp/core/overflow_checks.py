"""The gradients of an optimizer, and what blocks and backward passes found in them until its next step.

A block leaves an `OverflowCheck` with the `GuardedGrads` of each of its optimizers. A step resolves them: it reads
their flags, or hands them to the optimizer on its device, and each loss scaler hears once of all its blocks since.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.core.attach import stepped_params
from autoamp.core.gradients import found_any, marks_of, unchecked, unscale_
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
    several_processes,
    sync_group,
)
from autoamp.core.steps import Skips, Step, StepOwner

# At most so many checks wait for a step. Then they are read, and one that overflowed is left.
_MAX_PENDING_CHECKS = 64


class _Reported:
    """The result of a block or pass that its scaler has heard: None for none yet, else whether gradients overflowed."""

    told: bool | None = None


class OverflowCheck:
    """What one scaled block or backward pass found in the gradients, read or still on the device.

    Optimizers that share a block share its check: the scaler hears of the block once.

    Args:
        scaler: The scaler of the block.
        scale: The scale of the block.
        found: What `autoamp.core.unscale_` returned, and other tensors like these.
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


class GuardedGrads:
    """The gradients of one optimizer: their scale, the checks on them since its last step, and what other ranks found.

    Args:
        optimizer: Referred to weakly.
        masters: The masters that it steps in place of half parameters.
        skips: What is known of its steps.
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
        self, optimizer: Any, masters: MasterWeights | None, skips: Skips, owner: Callable[[], StepOwner[Any]]
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
        self._skips, self._owner = skips, owner
        # What the last block unscaled.
        self._unscaled: Sequence[Tensor] | None = None
        # Who agrees on steps, with the meshes and the request that it was found for.
        self._known: tuple[list[Any], RequestedGroup | None, SyncGroup | None] | None = None

    @property
    def optimizer(self) -> Any:
        """The optimizer, None once it is gone."""
        return self._optimizer()

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

    @property
    def scalers(self) -> Sequence[LossScaler]:
        """All loss scalers of the optimizer, in the same order on all ranks."""
        return self.own_scalers or self._owner().scalers

    @property
    def requested_group(self) -> RequestedGroup | None:
        """The process group over which the program wants steps to be agreed on, if it asked for one."""
        return self.asked or self._owner().requested_group(self.optimizer)

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
        return any(check.overflowed for check in self.checks) if self.checks else self._skips.step.skipped

    def resolve(self) -> OverflowCheck | None:
        """Read the pending checks, tell every scaler among them once, and return the check to blame, if any.

        The first that overflowed is to blame, and its scaler goes lower. Those before it were clean. Those after it say
        nothing, as an inf stays in a gradient that is accumulated.
        """
        self.resolved, self.checks = self.checks, []
        checks = self.resolved
        read_checks(checks)
        blamed = next((check for check in checks if check.overflowed), None)
        clean = list(checks if blamed is None else checks[: checks.index(blamed)])
        # Once: another optimizer of the block may have told the scaler, or of a later check of these gradients. One
        # that told of no overflow does not count: its gradients of the block were finite, these are not.
        if blamed is not None and not any(one.reported.told for one in checks if one.scaler is blamed.scaler):
            blamed.scaler.update(True)
        for scaler in dict.fromkeys(check.scaler for check in clean):
            heard = any(check.reported.told is not None for check in clean if check.scaler is scaler)
            if not heard and (blamed is None or scaler is not blamed.scaler):
                scaler.update(False)
        for check in checks:
            check.scaler.last_found_inf = blamed is not None and check.scaler is blamed.scaler
            if check in clean or check.overflowed:
                check.reported.told = bool(check.reported.told) or check not in clean
        if blamed is not None:
            # Inf and nan are in them from now on, and no pending check tells.
            self.checked = {}
        return blamed

    def resolve_dropped_grads(self) -> None:
        """Settle checks whose gradients the program dropped without a step: they skip none.

        Not where ranks agree on a step: another rank may have dropped nothing. There the next step is skipped.
        """
        if self.checks and not self.has_any() and self.group is None:
            self.resolve()

    def resolve_on_device(self) -> Tensor | None:
        """Settle the pending checks without reading them: the scaler moves on by a flag that stays on the device.

        Returns:
            The flag, fp32 without dimensions, not 0 where any gradient overflowed. None where checks must be read, and
            nothing was done: there are none, some are read already, several scalers have a part in them, the scaler
            lives on the host, or the host is to know at once.
        """
        if not self.checks or self._owner().steps.reads_flags:
            return None
        scaler, is_reported = self.checks[0].scaler, self.checks[0].reported.told is not None
        for check in self.checks:
            is_like_first = check.scaler is scaler and (check.reported.told is not None) is is_reported
            if check.overflowed is not None or not check.is_complete or not is_like_first:
                return None
        found = [flag for check in self.checks for flag in check.found]
        if not found or not all(scaler.serves_device(flag.device) for flag in found):
            return None
        flags = [flag.to(found[0].device, non_blocking=True).view(()) for flag in found]
        flag = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        skips, step = self._skips, self._skips.step

        def tell(skipped: bool) -> None:
            skips.end(step, scaler if skipped else None, scaler.scale_before, late=True)

        if step.unread is not scaler.unread:
            # Steps are counted in order, so those before are waited for.
            skips.catch_up()
            step.unread = scaler.unread
        (scaler.unread.add if is_reported else scaler.update_later)(flag, tell)
        for check in self.checks:
            # The device tells the scaler itself: another optimizer of the block has nothing to add.
            check.reported.told = True
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
            found = self._look(params if (last_step or self._skips.step).skipped else unchecked(params, self.checked))
            if found:
                check = OverflowCheck(*self.last, found)
                check.reported.told = True
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
            check.overflowed = None
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
