"""The `scale_loss` block: gradients are scaled on entry, unscaled and checked on exit.

`scaled_block` is the part of ``scale_loss`` that handles gradients. What it found in them goes to the guards of the
optimizers as an `OverflowCheck`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NoReturn, ParamSpec

from torch import Tensor

from autoamp.core.gradients import scale_, unscale_
from autoamp.core.guard import StepGuard
from autoamp.core.loss_scale import LossScaler
from autoamp.core.overflow_checks import OverflowCheck
from autoamp.core.setting_warnings import warn_without_gradients
from autoamp.core.unread_flags import Scale, is_same_scale, scale_ratio
from autoamp.errors import UsageError

_P = ParamSpec("_P")


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


class NeedsWith:
    """Answers the reading of an attribute of what ``scale_loss`` returns: ``scale_loss(...).backward()``."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"scale_loss() returns a context manager, which has no {name!r}; write `with handle.scale_loss(loss, "
            "optimizer) as scaled_loss: scaled_loss.backward()`",
            name=name,
            obj=self,
        )


class LossBlock(NeedsWith, contextlib._GeneratorContextManager[Tensor]):
    """What ``scale_loss`` returns: the context manager of a generator that yields the scaled loss."""


def loss_block(function: Callable[_P, Generator[Tensor, None, None]]) -> Callable[_P, LossBlock]:
    """Decorate a generator function as `contextlib.contextmanager` does: calls return a `LossBlock`."""

    @functools.wraps(function)
    def block(*args: _P.args, **kwargs: _P.kwargs) -> LossBlock:
        return LossBlock(function, args, kwargs)

    return block


class UnscaledBlock(NeedsWith, contextlib.nullcontext[Any]):
    """What ``scale_loss`` returns where nothing is scaled."""


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
    # Asked for once: the program may set the scale within the block.
    checks, scale = scaler.checks, _open(guards, scaler)
    open_blocks.open.number += 1
    try:
        try:
            yield scale
        except BaseException:
            # The program may catch the exception and step all the same: not with inf and nan.
            _leave(guards, scaler, scale, checks, warns=False)
            raise
        if delay_unscale:
            for guard in guards:
                guard.grads.collect()
                guard.grads.scale, guard.grads.delayed = scale, scaler if checks else None
        else:
            _leave(guards, scaler, scale, checks, warns=True)
    finally:
        open_blocks.open.number -= 1
        for guard in guards:
            guard.in_block = False


def _open(guards: Sequence[StepGuard], scaler: LossScaler) -> Scale:
    """Bring the gradients that are there to the scale of the block, and return that."""
    for guard in guards:
        if guard.in_block:
            raise UsageError(f"{guard.name} is in a scale_loss block already; end that block before the next")
    unscaled: set[int] = set()
    for guard in guards:
        guard.grads.collect(new_pass=True)
        guard.grads.resolve_dropped_grads()
        # What a block of the same scaler left scaled is brought to the scale of this one. An overflow in what a block
        # of another scaler left is that scaler's, so it is checked before this block adds to it.
        if guard.grads.delayed is not scaler or not scaler.checks or not guard.grads.has_any():
            guard.grads.finish_delayed(unscaled)
    # Read after the loop, in which checks were resolved: that may have changed it.
    scale = scaler.scale_without_sync()
    seen: set[int] = set()
    for guard in guards:
        # A parameter of several optimizers is brought to the scale once.
        params = [param for param in guard.grads.params() if param.grad is not None and id(param) not in seen]
        seen.update(map(id, params))
        if params and not is_same_scale(guard.grads.scale, scale):
            scale_(params, scale_ratio(scale, guard.grads.scale))
    for guard in guards:
        if guard.masters is not None:
            guard.masters.before_backward()
        guard.grads.scale, guard.in_block = scale, True
    return scale


def _leave(guards: Sequence[StepGuard], scaler: LossScaler, scale: Scale, checks: bool, *, warns: bool) -> None:
    """Unscale and check the gradients of all guards. Nothing waits for the device.

    The check concerns every optimizer that has gradients: none of them may step by a loss that overflowed for another.
    """
    for guard in guards:
        guard.grads.collect()
    check = None
    if checks:
        check = OverflowCheck(scaler, scale, _unscale(guards, scaler, scale))
    for guard in guards:
        # Ranks of a group reduce the flags of all: one without gradients takes part.
        is_concerned = guard.grads.has_any() or guard.grads.group is not None
        if warns and not is_concerned:
            warn_without_gradients(guard.name, guard.grads.params())
        guard.grads.scale, guard.grads.delayed = 1.0, None
        if check is not None:
            guard.grads.block_ended(check, is_concerned=is_concerned)


def _unscale(guards: Sequence[StepGuard], scaler: LossScaler, scale: Scale) -> list[Tensor]:
    """Unscale the gradients of all guards, and return flags of what this block made inf or nan.

    An overflow of an earlier block stays in the gradients of its optimizer. It says nothing of this loss, so an
    optimizer whose earlier check tells of one has no part in the flags.
    """
    params = [param for guard in guards for param in guard.grads.params() if param.grad is not None]
    waiting = [guard for guard in guards if guard.grads.checks] if len(guards) > 1 else []
    if not waiting:
        return unscale_(params, scale, scaler.unread.blank)
    # Inf in a gradient that several of them step by concerns those without an earlier check too.
    count = Counter(id(param.grad) for param in params)
    flags: list[Tensor] = []
    for guard in waiting:
        own = [param for param in guard.grads.params() if count[id(param.grad)] == 1]
        flags += _without_earlier(guard.grads.checks, unscale_(own, scale, scaler.unread.blank))
        unscaled = {id(param.grad) for param in own}
        params = [param for param in params if id(param.grad) not in unscaled]
    return [*flags, *unscale_(params, scale, scaler.unread.blank)]


def _without_earlier(checks: Sequence[OverflowCheck], flags: Sequence[Tensor]) -> Sequence[Tensor]:
    """Clear flags if a check of an earlier block tells of an overflow. Waits for nothing."""
    if any(check.overflowed for check in checks):
        return ()
    for flag in flags:
        for earlier in (one for check in checks for one in check.found):
            flag.mul_(earlier.to(flag.device, non_blocking=True) == 0)
    return flags
