"""The recording of a run for its report: the loss scale and the skips of all steps, samples of some.

It changes no result. Between samples it costs some microseconds for each call of a listed function.
"""

from __future__ import annotations

import contextlib
from typing import Any

from autoamp.diagnostics.half_losses import HalfLosses
from autoamp.diagnostics.observer import Watch
from autoamp.diagnostics.report.sampling import Samples
from autoamp.diagnostics.report.step_check import StepCheck
from autoamp.diagnostics.verdicts import Overflow
from autoamp.program import listen


class ReportRecording(Watch):
    """The recording from ``handle.record()`` on, until `stop`, or the end of a ``with`` statement.

    Args:
        handle: The `Runtime` of the run.
        sample: Whether some steps are sampled.

    Attributes:
        steps: The number of optimizer steps, skips included.
        scales: The loss scales, each with the first step that had it.
        skips: The step, the scale and the `Overflow` of each skip; None for a skip that was not explained.
        samples: Casts and values of some steps.
        check: Comparisons of some steps with fp32.
        half_losses: What half precision lost without an inf.
    """

    def __init__(self, handle: Any, *, sample: bool = True) -> None:
        super().__init__(self._end)
        self.steps = 0
        self.scales: list[tuple[int, float]] = []
        self.skips: list[tuple[int, float, Overflow | None]] = []
        self.samples = Samples(handle)
        self.check = StepCheck(handle)
        self.half_losses: HalfLosses = handle.half_losses or HalfLosses()
        self._handle = handle
        self._sample = sample
        self._skipped_before = handle.optimizers.step_stats.skipped
        self._stack = contextlib.ExitStack()

    def start(self) -> ReportRecording:
        """Begin with the coming step."""
        stack, overflows = self._stack, self._handle.overflows
        stack.callback(self._handle.followers.add(self._stepped, after_skips=True))
        stack.enter_context(listen(optimizer_called=lambda *_: self.check.compare(self.steps)))
        overflows.listeners.append(self._overflowed)
        stack.callback(overflows.listeners.remove, self._overflowed)
        if self._sample:
            stack.enter_context(self._handle.observation.observe(self.samples))
            self.samples.await_step(0)
            if not self.half_losses.active:
                self.half_losses.start()
                stack.callback(self.half_losses.stop)
        self.scales.append((0, self._scale()))
        return self

    def _end(self) -> None:
        self.samples.end()
        if self.scales:
            self._note_scale()
            self._note_skips()
        self._stack.close()

    def _stepped(self) -> None:
        """Count a step."""
        self._note_skips()
        self.steps += 1
        self._note_scale()
        self.samples.end()
        if self._sample:
            self.samples.await_step(self.steps)

    def _waits_for_device(self) -> bool:
        """Whether reading the scale would wait for the device, which only the end of the recording may do."""
        return self.active and any(len(scaler.unread) for scaler in self._handle.optimizers.scalers)

    def _note_scale(self) -> None:
        if not self._waits_for_device() and self.scales[-1][1] != (scale := self._scale()):
            self.scales.append((self.steps, scale))

    def _scale(self) -> float:
        return float(self._handle.optimizers.step_stats.loss_scale(self._handle.optimizers.scalers[0].loss_scale))

    def _note_skips(self) -> None:
        """Note the skips that were not explained."""
        if self._handle.overflows.always or self._waits_for_device():
            return
        skipped = self._handle.optimizers.step_stats.skipped - self._skipped_before
        self.skips += [(self.steps, self.scales[-1][1], None)] * (skipped - len(self.skips))

    def _overflowed(self, found: Overflow) -> None:
        self.skips.append((self.steps, found.loss_scale or self.scales[-1][1], found))
