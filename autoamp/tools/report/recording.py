"""The recording of a run for its report: the loss scale and the skips of all steps, samples of some.

It changes no result. Between samples it costs some microseconds for each call of a listed function.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import torch

from autoamp.core import Guards, listen
from autoamp.tools.buffer_writes import BufferWrites
from autoamp.tools.casts import CastTrace
from autoamp.tools.half_losses import HalfLosses
from autoamp.tools.monitors import Followers
from autoamp.tools.observer import Call, Observation, Observer, Watch
from autoamp.tools.overflow import OverflowTrace
from autoamp.tools.ranges import ValueProfile
from autoamp.tools.step_check import StepCheck
from autoamp.tools.verdicts import Overflow
from autoamp.torch_private import dispatch_modes

# A sample ends after so many calls of listed functions: a program that only evaluates makes no step.
_MOST_CALLS = 5_000
# Those of the trace and of the values.
_MODES = 2


class Samples(Observer):
    """Samples the steps 0, 10 and 100, and each 1000th, and adds up their casts and values.

    Args:
        observation: The observers of patched functions.

    Attributes:
        steps: The numbers of the sampled steps.
        trace: The casts of all samples.
        values: The exponents of all samples.
    """

    def __init__(self, observation: Observation) -> None:
        self.steps: list[int] = []
        self.trace = CastTrace(observation)
        self.values = ValueProfile(observation)
        self._observation = observation
        # Of the running sample: what ends it, its thread, None if there is none, and the number of its calls.
        self._stack = contextlib.ExitStack()
        self._thread: int | None = None
        self._calls = 0

    def await_step(self, step: int) -> None:
        """Begin a sample at the next call of a model, if the coming step is to be sampled."""
        if (step in (0, 10, 100) or step % 1000 == 0) and self._thread is None:
            self._observation.on_model = functools.partial(self._model_called, step)

    def ended(self) -> None:
        """Await no step any more."""
        self._observation.on_model = None

    def _model_called(self, step: int) -> None:
        # A call without gradients between two steps is an evaluation. Before step 0 it may be the whole program.
        if step > 0 and not torch.is_grad_enabled():
            return
        self._observation.on_model = None
        # The program's own mode may end before the step, and the mode that began last ends first.
        if dispatch_modes():
            return
        self._stack.enter_context(self.trace)
        self._stack.enter_context(self.values)
        self.steps.append(step)
        self._thread, self._calls = threading.get_ident(), 0

    def end(self) -> None:
        """End the running sample, if there is one."""
        # A mode ends in the thread in which it began, and after the modes that began later.
        if self._thread == threading.get_ident() and dispatch_modes() <= _MODES:
            self._thread = None
            self._stack.close()

    def before(self, call: Call) -> None:
        """End a sample that has become too long."""
        if self._thread is not None and call.outer is None:
            self._calls += 1
            if self._calls >= _MOST_CALLS:
                self.end()


class ReportRecording(Watch):
    """The recording from ``handle.record()`` on, until `stop`, or the end of a ``with`` statement.

    Args:
        optimizers: The optimizers whose steps are recorded.
        overflows: Explains their skips.
        followers: Are called after their steps.
        half_losses: Looks for what half precision loses without an inf.
        buffer_writes: Looks for what half buffers lose.
        sample: Whether some steps are sampled.

    Attributes:
        optimizers: As given.
        overflows: As given.
        half_losses, buffer_writes: As given.
        steps: The number of optimizer steps, skips included.
        scales: The loss scales, each with the first step that had it.
        skips: The step, the scale and the `Overflow` of each skip; None for a skip that was not explained.
        samples: Casts and values of some steps.
        check: Comparisons of some steps with fp32.
    """

    def __init__(
        self,
        optimizers: Guards,
        overflows: OverflowTrace,
        followers: Followers,
        half_losses: HalfLosses,
        buffer_writes: BufferWrites,
        *,
        sample: bool = True,
    ) -> None:
        super().__init__(self._end)
        self.steps = 0
        self.scales: list[tuple[int, float]] = []
        self.skips: list[tuple[int, float, Overflow | None]] = []
        self.samples = Samples(overflows.observation)
        self.check = StepCheck(overflows)
        self.optimizers, self.overflows = optimizers, overflows
        self.half_losses, self.buffer_writes = half_losses, buffer_writes
        self._followers = followers
        self._sample = sample
        self._skipped_before = optimizers.steps.skipped
        self._stack = contextlib.ExitStack()

    @property
    def losses(self) -> list[dict[str, Any]]:
        """What half precision lost without an inf, a row for each."""
        return [*self.half_losses.rows.values(), *self.buffer_writes.rows]

    def start(self) -> ReportRecording:
        """Begin with the coming step."""
        stack, overflows = self._stack, self.overflows
        stack.callback(self._followers.add(self._stepped, after_skips=True))
        stack.enter_context(listen(optimizer_called=self._called))
        overflows.listeners.append(self._overflowed)
        stack.callback(overflows.listeners.remove, self._overflowed)
        if self._sample:
            stack.enter_context(overflows.observation.observe(self.samples))
            self.samples.await_step(0)
            if not self.half_losses.active:
                self.half_losses.start()
                stack.callback(self.half_losses.stop)
        if self.half_losses.active:
            listeners = self.optimizers.listeners
            listeners.add(self.buffer_writes)
            stack.callback(listeners.remove, self.buffer_writes)
        self.scales.append((0, self._scale()))
        return self

    def _end(self) -> None:
        self.samples.end()
        if self.scales:
            self._note_scale()
            self._note_skips()
        self._stack.close()

    def _called(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Compare a step that begins with fp32. Returns what torch calls it with, if it has a closure."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        evaluate = self.check.compare(self.steps, closure if callable(closure) else None)
        if evaluate is None:
            return None
        return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})

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
        return self.active and any(len(scaler.unread) for scaler in self.optimizers.scalers)

    def _note_scale(self) -> None:
        if not self._waits_for_device() and self.scales[-1][1] != (scale := self._scale()):
            self.scales.append((self.steps, scale))

    def _scale(self) -> float:
        return float(self.optimizers.steps.loss_scale(self.optimizers.scalers[0].loss_scale))

    def _note_skips(self) -> None:
        """Note the skips that were not explained."""
        if self.overflows.always or self._waits_for_device():
            return
        skipped = self.optimizers.steps.skipped - self._skipped_before
        self.skips += [(self.steps, self.scales[-1][1], None)] * (skipped - len(self.skips))

    def _overflowed(self, found: Overflow) -> None:
        self.skips.append((self.steps, found.loss_scale or self.scales[-1][1], found))
