"""The program's own `torch.amp.GradScaler`: its skipped steps are counted and explained, its numbers stay untouched."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from autoamp.program import Subscriber
from autoamp.scaling import StaticLossScaler, UnreadFlags
from autoamp.stepping import GuardedOptimizers, Skips, Step

# A scale that was backed off to 0 is told as this.
_LOWEST = 2.0**-126


class GradScalerWatch(Subscriber):
    """Counts the steps that a `torch.amp.GradScaler` of the program skips.

    Args:
        optimizers: Those of the handle; they count the skips.

    Attributes:
        stepping: Whether such a scaler steps an optimizer now: it has checked the gradients.
    """

    def __init__(self, optimizers: GuardedOptimizers) -> None:
        self.stepping = False
        self._optimizers = optimizers
        self._skips: weakref.WeakKeyDictionary[Any, Skips] = weakref.WeakKeyDictionary()
        self._unread = UnreadFlags()
        # Set as the optimizer is called; the flag is there where the optimizer itself skips, as fused ones do.
        self._called = False
        self._flag: Tensor | None = None

    def catch_up(self) -> None:
        """Learn what became of the last steps where only the device knows it; waits for the device."""
        self._unread.catch_up()

    def optimizer_called(self, optimizer: Any) -> None:
        """Take note that an optimizer is called, which only counts within the scaler's ``step``."""
        self._called = True
        flag = getattr(optimizer, "found_inf", None)
        self._flag = self._optimizers.step_stats.last.flag = flag if isinstance(flag, Tensor) else None

    def loss_scaled(self, scaler: torch.amp.GradScaler, outputs: Any) -> None:
        """Take note of a loss that is scaled."""
        if isinstance(outputs, Tensor) and scaler.is_enabled() and not torch.compiler.is_dynamo_compiling():
            self._optimizers.program.tell(Subscriber.backward_begins, outputs, _LazyScale(scaler))

    def around_unscale(self, original: Any) -> Any:
        """Return an ``unscale_`` whose errors are explained."""

        def unscale_(self_: Any, optimizer: Any) -> None:
            try:
                original(self_, optimizer)
            except Exception as error:
                self._optimizers.casts.explain(error)
                raise

        return unscale_

    def around_scaler_step(self, original: Any) -> Any:
        """Return a ``step`` that is counted."""

        def step(self_: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self.stepping or not self_.is_enabled() or torch.compiler.is_dynamo_compiling():
                return original(self_, optimizer, *args, **kwargs)
            self._optimizers.step_stats.own_scale = _LazyScale(self_)
            self.stepping, self._called, self._flag = True, False, None
            try:
                result = original(self_, optimizer, *args, **kwargs)
            finally:
                self.stepping = False
            self._count(self_, optimizer)
            return result

        return step

    def _count(self, scaler: Any, optimizer: Any) -> None:
        """Count the step that the scaler has just taken or skipped."""
        guard, flag = self._optimizers.guard_of(optimizer), self._flag
        if guard is None and optimizer not in self._skips:
            self._skips[optimizer] = Skips(type(optimizer).__name__, lambda: self._optimizers)
        skips = self._skips[optimizer] if guard is None else guard.skips
        if not self._called:
            # The scaler skipped the step without a call of the optimizer.
            self._optimizers.step_stats.step_begins(skips.begin())
            self._optimizers.program.tell(Subscriber.step_begins)
        elif guard is None:
            skips.step = self._optimizers.step_stats.last
        if flag is not None and self._unread.serves(flag.device):
            self._unread.add(flag, functools.partial(_tell_late, skips, skips.step, weakref.ref(scaler)), urgent=True)
        elif not self._called or (flag is not None and bool(flag)):
            scale = scaler.get_scale()
            skips.end(skips.step, _scaler_after(scale * scaler.get_backoff_factor()), scale)
        elif guard is None and not skips.step.skipped:
            skips.end(skips.step)
        if not self._called:
            self._optimizers.program.tell(Subscriber.step_ended, skips.step)


class _LazyScale:
    """The scale of a `GradScaler`, which is read when it is needed: reading it may wait for the device."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def __float__(self) -> float:
        return float(self._scaler.get_scale())


def _scaler_after(scale: float) -> StaticLossScaler:
    return StaticLossScaler(max(scale, _LOWEST))


def _tell_late(skips: Skips, step: Step, reference: weakref.ref[Any], skipped: bool) -> None:
    """Count a step that was taken earlier. By now the scaler has been updated once for it."""
    scaler = reference()
    scale = scaler.get_scale() if skipped and scaler is not None else 1.0
    backoff = 1.0 if scaler is None else scaler.get_backoff_factor()
    skips.end(step, _scaler_after(scale) if skipped else None, scale / backoff, late=True)
