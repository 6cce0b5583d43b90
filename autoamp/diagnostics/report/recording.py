"""A recording of a run, for its report: the scale's way and the skips always, casts and values of some steps.

It changes no result. Between samples it costs a look at the loss scale for each step.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoamp.diagnostics.observer import Watch
from autoamp.diagnostics.report.sampling import Allowance, Samples
from autoamp.diagnostics.report.step_check import StepCheck
from autoamp.diagnostics.verdicts import Overflow
from autoamp.torch_private import compiled_graphs

__all__ = ["Recording"]

_MOST_POINTS = 20_000
_MOST_SKIPS = 5_000


class Recording(Watch):
    """What is recorded from ``handle.record()`` on, until `stop`, or the end of a ``with`` statement.

    Args:
        handle: Whose run it is.
        sample: Whether some steps are looked at closely.

    Attributes:
        steps: How many steps of optimizers there were, skips included.
        scales: The steps from which the loss scale had another value, and that value.
        skips: The step, the scale and the `Overflow` of each skip; None where nobody explained it.
        samples: Casts and values of some steps.
        check: Comparisons of some steps with fp32.
        allowance: The time that both may take.
    """

    def __init__(self, handle: Any, *, sample: bool = True) -> None:
        super().__init__(self._end)
        self.steps = 0
        self.scales: list[tuple[int, float]] = []
        self.skips: list[tuple[int | None, float | None, Overflow | None]] = []
        self.allowance = Allowance()
        self.samples = Samples(handle, self.allowance)
        self.check = StepCheck(handle, self.allowance)
        self._handle = handle
        self._sample = sample
        self._graphs = compiled_graphs()
        # The seconds and the graphs up to the end.
        self._total: tuple[float, int] | None = None
        self._guarded_steps = handle.optimizers.counts.steps
        self._skipped = handle.optimizers.counts.all_skipped
        self._stack = contextlib.ExitStack()

    @property
    def active(self) -> bool:
        """Whether steps are recorded now."""
        return self._total is None

    @property
    def seconds(self) -> float:
        """The time since the beginning, up to the end."""
        return time.perf_counter() - self.allowance.began if self._total is None else self._total[0]

    @property
    def graphs(self) -> int:
        """How many graphs torch.compile made, from the beginning to the end."""
        return compiled_graphs() - self._graphs if self._total is None else self._total[1]

    def start(self) -> Recording:
        """Begin: with the step that comes."""
        stack, overflows = self._stack, self._handle.overflows
        stack.callback(self._handle.on_step(self._stepped))
        stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
        overflows.listeners.append(self._overflowed)
        stack.callback(overflows.listeners.remove, self._overflowed)
        self._note_scale()
        if self._sample:
            self.samples.await_step(0)
            if hasattr(os, "register_at_fork"):
                # A child would have the modes of a sample to its end.
                samples = weakref.ref(self.samples)
                os.register_at_fork(before=lambda: None if (found := samples()) is None else found.end("limit"))
        return self

    def _end(self) -> None:
        self.samples.end("end")
        self._note_scale()
        self._note_skips()
        self.samples.stop()
        self._total = self.seconds, self.graphs
        self._stack.close()

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self.check.compare(self.steps)
        self.samples.before_step(optimizer)

    def _stepped(self, *of_torch: Any) -> None:
        """Count a step. Torch's hook calls this with arguments, for plain steps; the guards call it for theirs."""
        now = self._handle.optimizers.counts.steps
        guarded = now != self._guarded_steps
        if guarded == bool(of_torch):
            return
        self._guarded_steps = now
        if self._handle.optimizers.rehearsal is not None or not self.active:
            return
        self._note_skips()
        self.steps += 1
        self._note_scale()
        self.samples.end("step")
        if self._sample:
            # Within torch's hook of a step nothing may be installed.
            self.samples.await_step(self.steps, may_install=guarded)

    def _known_now(self) -> bool:
        """Tell whether the scale is known without waiting for the device."""
        return not any(len(scaler.unread) for scaler in self._handle.optimizers.scalers)

    def _note_scale(self) -> None:
        optimizers = self._handle.optimizers
        if len(self.scales) >= _MOST_POINTS or (self.active and not self._known_now()):
            return
        scale = optimizers.counts.loss_scale(optimizers.scalers[0].loss_scale)
        if not self.scales or self.scales[-1][1] != scale:
            self.scales.append((self.steps, float(scale)))

    def _note_skips(self) -> None:
        """Note skips that nobody explained."""
        if self._handle.overflows.always or not self._known_now():
            return
        total = self._handle.optimizers.counts.all_skipped
        for _ in range(min(total - self._skipped, _MOST_SKIPS - len(self.skips))):
            self.skips.append((self.steps, self.scales[-1][1] if self.scales else None, None))
        self._skipped = total

    def _overflowed(self, found: Overflow) -> None:
        self._skipped += 1
        if len(self.skips) < _MOST_SKIPS:
            self.skips.append((self.steps, found.loss_scale, found))
