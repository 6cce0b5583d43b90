"""The gradients of an optimizer, and the `scale_loss` block: gradients scaled on entry, unscaled and checked on exit.

`scaled_block` is the part of ``scale_loss`` that handles gradients. What it found in them goes to the guards of the
optimizers as an `OverflowCheck`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from autoamp.casting import Casts
from autoamp.errors import UsageError
from autoamp.patching import imitate
from autoamp.scaling import LossScaler, Scale, is_same_scale, scale_, scale_ratio, scaled_loss, unscale_
from autoamp.stepping.checks import warn_without_gradients
from autoamp.stepping.guard import OverflowCheck, StepGuard
from autoamp.stepping.usage_checks import BackwardWatch

__all__ = ["ScaledLoss", "open_blocks", "scaled_block", "watch_autograd_grad"]


class _OpenBlocks(threading.local):
    """The blocks of a thread in which the program scales its loss.

    Attributes:
        count: How many are open.
        differentiated: How often the program asked within one for gradients that go to no ``.grad``.
    """

    count = 0
    differentiated = 0


open_blocks = _OpenBlocks()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _count(change: int) -> None:
    # Traced by torch.compile, the count came out as -1: Dynamo guards no attribute of a threading.local.
    open_blocks.count += change


class ScaledLoss:
    """A block over its loss times its scale, after which kept casts are dropped.

    The first block of an optimizer in which the scaled loss runs backward is watched for a pass of the loss itself.

    Args:
        loss: Not scaled.
        guards: Of the optimizers.
        block: Gives the scale.
        casts: Those that are kept.
    """

    def __init__(self, loss: Tensor, guards: Sequence[StepGuard], block: scaled_block, casts: Casts) -> None:
        self._loss, self._guards, self._block, self._casts = loss, guards, block, casts
        self._watch: BackwardWatch | None = None

    def __enter__(self) -> Tensor:
        scale = self._block.__enter__()
        try:
            scaled = scaled_loss(self._loss, scale)
            if self._block.checks and not all(guard.proven for guard in self._guards):
                self._watch = None if torch.compiler.is_compiling() else BackwardWatch(self._loss, scaled)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return scaled

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
        try:
            if watch is not None and kind is None:
                if not self._block.was_differentiated():
                    watch.check(self._guards[0].name)
                for guard in self._guards:
                    guard.proven = guard.proven or watch.proven
        except UsageError:
            self._block.__exit__(*sys.exc_info())
            raise
        else:
            self._block.__exit__(kind, error, trace)
        finally:
            self._casts.cache.clear()


class scaled_block:  # noqa: N801, named as what it is in a with statement
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

    def __init__(self, guards: Iterable[StepGuard], scaler: LossScaler, *, delay_unscale: bool = False) -> None:
        self._guards = tuple(dict.fromkeys(guards))
        self._scaler = scaler
        self._delay_unscale = delay_unscale
        self._scale: Scale = 1.0
        self._differentiated = 0

    @property
    def checks(self) -> bool:
        """Whether the scaler checks gradients."""
        return self._scaler.checks

    def was_differentiated(self) -> bool:
        """Tell whether the program asked within the block for gradients that go to no ``.grad``."""
        return open_blocks.differentiated != self._differentiated

    def __enter__(self) -> Scale:
        self._scale = _open(self._guards, self._scaler)
        _count(1)
        self._differentiated = open_blocks.differentiated
        return self._scale

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        guards, scaler = self._guards, self._scaler
        try:
            for guard in guards:
                guard.grads.collect()
            if kind is not None:
                # The program may catch the exception and step all the same: not with inf and nan.
                _leave(guards, scaler, self._scale, not is_same_scale(self._scale, 1.0), warns=False)
            elif self._delay_unscale:
                for guard in guards:
                    guard.leave_block(self._scale, delayed=scaler if scaler.checks else None)
            else:
                _leave(guards, scaler, self._scale, scaler.checks, warns=not self.was_differentiated())
        finally:
            _count(-1)
            for guard in guards:
                guard.in_block = False


def _open(guards: Sequence[StepGuard], scaler: LossScaler) -> Scale:
    """Bring the gradients that are there to the scale of the block, and return the scale."""
    for guard in guards:
        if guard.in_block:
            raise UsageError(f"{guard.name} is in a scale_loss block already; end that block before the next")
    for guard in guards:
        guard.prepare_block(finishes_delayed=not scaler.checks)
    # Read after the loop, in which checks were resolved: that may have changed it.
    scale = scaler.scale_at_hand()
    _rescale(guards, scale)
    for guard in guards:
        guard.grads.before_backward()
        guard.grads.scale, guard.in_block = scale, True
    return scale


def _rescale(guards: Sequence[StepGuard], scale: Scale) -> None:
    """Multiply gradients that have another scale, those of a parameter of several optimizers once."""
    seen: set[int] = set()
    for guard in guards:
        params = [param for param in guard.grads.params() if param.grad is not None and id(param) not in seen]
        seen.update(map(id, params))
        if params and not is_same_scale(guard.grads.scale, scale):
            scale_(params, scale_ratio(scale, guard.grads.scale))


def _leave(guards: Sequence[StepGuard], scaler: LossScaler, scale: Scale, checks: bool, *, warns: bool) -> None:
    """Unscale and check, and leave a check with every optimizer that has gradients."""
    present = [guard.grads.has_any() for guard in guards]
    found: OverflowCheck | None = None
    if checks and any(present):
        params = [param for guard in guards for param in guard.grads.params()]
        found = OverflowCheck(scaler, scale, unscale_(params, scale, scaler.unread.blank))
    for guard, has_gradients in zip(guards, present, strict=True):
        check = found
        if not has_gradients:
            guard.refuse_replaced_params()
            is_shared = guard.checks.group is not None
            # Ranks of a group reduce the flags of all: a rank without gradients has found nothing.
            check = OverflowCheck(scaler, scale, ()) if checks and is_shared else None
            if warns and not is_shared:
                warn_without_gradients(guard.name, guard.grads.params())
        guard.leave_block(1.0, check)
        if checks:
            guard.checks.block_ended(scaler, scale)


def watch_autograd_grad(original: Any) -> Any:
    """Return a replacement of `torch.autograd.grad` that counts its calls in blocks.

    A block in which the program asked for gradients in this way may leave nothing in ``.grad``, and nobody is warned.
    """

    def grad(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and open_blocks.count:
            open_blocks.differentiated += 1
        return original(*args, **kwargs)

    return imitate(grad, original, "torch.autograd", "grad")
