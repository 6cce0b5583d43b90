"""The gradients of an optimizer, and the `scale_loss` block: gradients scaled on entry, unscaled and checked on exit.

`scaled_block` is the part of ``scale_loss`` that handles gradients. What it found in them goes to the guards of the
optimizers as an `OverflowCheck`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from autoamp.errors import UsageError
from autoamp.scaling import LossScaler, Scale, is_same_scale, scale_, scale_ratio, unscale_
from autoamp.stepping.guard import StepGuard
from autoamp.stepping.overflow_checks import OverflowCheck
from autoamp.stepping.setting_warnings import warn_without_gradients


class _Count:
    """A plain object: what compiled code sets on a `threading.local` itself, no guard of Dynamo sees."""

    number = 0


class _OpenBlocks(threading.local):
    """The blocks of a thread in which the program scales its loss."""

    def __init__(self) -> None:
        self.open = _Count()

    @property
    def count(self) -> int:
        """How many are open."""
        return self.open.number


open_blocks = _OpenBlocks()


@contextlib.contextmanager
def scaled_block(guards: Iterable[StepGuard], scaler: LossScaler, *, delay_unscale: bool = False) -> Iterator[Scale]:
    """A block in which the gradients of some optimizers are those of a scaled loss.

    Inside, everything in ``.grad`` has the scale of the block: gradients of earlier blocks are multiplied by it first.
    After it they have true values again, also after an exception. A scaler that does not check (scale 1.0) costs no
    pass over the gradients.

    Args:
        guards: Of the optimizers whose gradients the loss makes; none where only the gradients of inputs are wanted.
        scaler: Gives the scale, and is told later what became of it.
        delay_unscale: Leave the gradients scaled, for a later block or the step to unscale and check.

    Yields:
        The scale: multiply the loss by it.

    Raises:
        UsageError: One of the optimizers is in a block already.
    """
    guards = tuple(dict.fromkeys(guards))
    scale, added_to = _open(guards, scaler)
    open_blocks.open.number += 1
    try:
        try:
            yield scale
        except BaseException:
            # The program may catch the exception and step all the same: not with inf and nan.
            _leave(guards, added_to, scaler, scale, not is_same_scale(scale, 1.0), warns=False)
            raise
        if delay_unscale:
            for guard in guards:
                guard.grads.collect()
                guard.leave_block(scale, delayed=scaler if scaler.checks else None)
        else:
            _leave(guards, added_to, scaler, scale, scaler.checks, warns=True)
    finally:
        open_blocks.open.number -= 1
        for guard in guards:
            guard.in_block = False


def _open(guards: Sequence[StepGuard], scaler: LossScaler) -> tuple[Scale, list[StepGuard]]:
    """Bring the gradients that are there to the scale of the block. Returns it, and ``added_to`` as in `_check`."""
    for guard in guards:
        if guard.in_block:
            raise UsageError(f"{guard.name} is in a scale_loss block already; end that block before the next")
    for guard in guards:
        guard.grads.collect(new_pass=True)
        guard.pending.unscale_added_params()
        guard.pending.resolve_dropped_grads()
        if not scaler.checks or not guard.grads.has_any():
            guard.pending.finish_delayed()
        if len(guards) > 1:
            # What the program wrote since concerns one optimizer, and not the others of this block.
            guard.pending.look_before_block()
    # Read after the loop, in which checks were resolved: that may have changed it.
    scale = scaler.scale_without_sync()
    seen: set[int] = set()
    for guard in guards:
        # A parameter of several optimizers is brought to the scale once.
        params = [param for param in guard.grads.params() if param.grad is not None and id(param) not in seen]
        seen.update(map(id, params))
        if params and not is_same_scale(guard.grads.scale, scale):
            scale_(params, scale_ratio(scale, guard.grads.scale))
    added_to = [guard for guard in guards if guard.grads.has_any()] if len(guards) > 1 else []
    for guard in guards:
        if guard.masters is not None:
            guard.masters.before_backward()
        guard.grads.scale, guard.in_block = scale, True
    return scale, added_to


def _leave(
    guards: Sequence[StepGuard],
    added_to: Sequence[StepGuard],
    scaler: LossScaler,
    scale: Scale,
    checks: bool,
    *,
    warns: bool,
) -> None:
    """Unscale and check, and leave a check with every optimizer that has gradients."""
    for guard in guards:
        guard.grads.collect()
    present = [guard.grads.has_any() for guard in guards]
    found: Sequence[OverflowCheck | None] = [None] * len(guards)
    if checks and any(present):
        found = _check(guards, added_to, scaler, scale)
    for guard, has_gradients, check in zip(guards, present, found, strict=True):
        if has_gradients:
            guard.leave_block(1.0, check)
        else:
            is_shared = guard.pending.group is not None
            if warns and not is_shared:
                warn_without_gradients(guard.name, guard.grads.params())
            # Ranks of a group reduce the flags of all: a rank without gradients has found nothing.
            guard.leave_block(1.0, OverflowCheck(scaler, scale, ()) if checks and is_shared else None)
        if checks:
            guard.pending.block_ended(scaler, scale)


def _check(
    guards: Sequence[StepGuard], added_to: Sequence[StepGuard], scaler: LossScaler, scale: Scale
) -> list[OverflowCheck]:
    """Unscale the gradients of all guards, and return a check for each of them. Nothing waits for the device.

    An overflow concerns all optimizers of the block. But inf that was in a gradient before concerns those alone that
    step by this gradient: it says nothing of the loss of this block.

    Args:
        guards: Of the block's optimizers.
        added_to: Those of them that had gradients before the block, where there are several guards.
        scaler: Of the block.
        scale: Of the block.
    """
    if not added_to:
        params = [param for guard in guards for param in guard.grads.params()]
        return [OverflowCheck(scaler, scale, unscale_(params, scale, scaler.unread.blank))] * len(guards)
    owners: dict[int, tuple[Tensor, list[StepGuard]]] = {}
    for guard in guards:
        for param in guard.grads.params():
            owners.setdefault(id(param), (param, []))[1].append(guard)
    by_owners: dict[tuple[StepGuard, ...], list[Tensor]] = {}
    for param, steppers in owners.values():
        by_owners.setdefault(tuple(steppers), []).append(param)
    of_block, of_guard = list[Tensor](), {guard: list[Tensor]() for guard in guards}
    for group, params in by_owners.items():
        for flag in unscale_(params, scale, scaler.unread.blank):
            before = [guard.pending.earlier_flag(flag.device) for guard in group]
            # One of them is enough: only its check tells of inf in what they share.
            of_block.append(torch.where(torch.stack(before).amax() != 0, 0.0, flag))
            for guard in group:
                of_guard[guard].append(flag)
    checks: list[OverflowCheck] = []
    for own in of_guard.values():
        checks.append(OverflowCheck(scaler, scale, [*own, *of_block], earlier=checks[0] if checks else None))
    return checks
