"""A recording of a run, for its report: the scale's way and the skips always, casts and values of some steps.

It changes no result. Between samples it costs a look at the loss scale for each step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoamp.diagnostics.observer import Observer, Watch
from autoamp.diagnostics.ranges import ValueProfile
from autoamp.diagnostics.report.sampling import CallTimes, Sample, SampleObserver, Samples, is_checked, plan
from autoamp.diagnostics.report.step_check import Entry, Fault, StepCheck, cause_of
from autoamp.diagnostics.trace import CastTrace
from autoamp.diagnostics.verdicts import HalfPrecisionOp, Overflow
from autoamp.torch_private import compiled_graphs, dispatch_modes

__all__ = ["Recorded", "Recording"]

log = logging.getLogger(__name__)

_MOST_POINTS = 20_000
_MOST_SKIPS = 5_000
# Samples together may take so many seconds, and so much of the time since the beginning.
_FREE, _PART = 2.0, 0.1
# Of so many causes entries are tried.
_MOST_CAUSES = 6


class Recorded(Protocol):
    """What of a handle a recording asks for."""

    settings: Any
    optimizers: Any
    overflows: Any
    casts: Any
    precisions: Any
    observation: Any

    def observe(self, observer: Observer) -> Watch:
        """Tell an observer of each call."""

    def trace(self) -> CastTrace:
        """Return a cast trace."""

    def look_at_values(self) -> ValueProfile:
        """Return a profile of values as they are computed."""

    def on_model(self, told: Callable[[], object] | None) -> None:
        """Call this before each outermost call of a module, while anything observes."""

    def on_step(self, told: Callable[[], object]) -> Callable[[], None]:
        """Call this after each step of a guarded optimizer; return what ends that."""


class Recording(Watch):
    """What is recorded from ``handle.record()`` on, until `stop`, or the end of a ``with`` statement.

    Args:
        handle: Whose run it is.
        sample: Whether some steps are looked at closely.
        times: Whether calls are timed in these.

    Attributes:
        steps: How many steps of optimizers there were, skips included.
        scales: The steps from which the loss scale had another value, and that value.
        skips: The step, the scale and the `Overflow` of each skip; None where nobody explained it.
        samples: What was seen of the steps that were looked at.
        onlooker: What was seen of calls that nothing was cast for.
        seconds: The time since the beginning.
        left_out: How many samples were not taken, as those before had taken the time for them.
        graphs: How many graphs torch.compile made meanwhile.
        trouble: Why steps were not looked at, where that is so.
        faults: What half precision spoiled in steps that were taken.
        entries: By the cause of skips the entry of a list that cures it; None where none does.
        compared: How many steps were compared with fp32.
        compared_seconds: The time for that.
        unchecked: Why a step could not be compared, where that is so.
    """

    def __init__(self, handle: Recorded, *, sample: bool = True, times: bool = True) -> None:
        super().__init__(self._end)
        self.steps = 0
        self.scales: list[tuple[int, float]] = []
        self.skips: list[tuple[int, float | None, Overflow | None]] = []
        self.samples = Samples()
        self.left_out = 0
        self.onlooker = SampleObserver(
            handle.settings.device_type, lambda: self._allowed() < 0, lambda: self._end_sample("limit")
        )
        self.trouble: str | None = None
        self.faults: list[Fault] = []
        self.entries: dict[Any, Entry | None] = {}
        self.compared = 0
        self.compared_seconds = 0.0
        self.unchecked: str | None = None
        self._check = StepCheck(handle) if handle.overflows.always else None
        self._handle = handle
        self._sample, self._times = sample, times
        self._began = time.perf_counter()
        self._ended_at: float | None = None
        self._graphs = compiled_graphs()
        self._graphs_at_end: int | None = None
        self._guarded_steps = handle.optimizers.counts.steps
        self._skipped = handle.optimizers.counts.all_skipped
        self._running: tuple[int, str, Any, int, float] | None = None
        self._held: Watch | None = None
        self._stack = contextlib.ExitStack()

    @property
    def seconds(self) -> float:
        """The time since the beginning, up to the end."""
        return (self._ended_at or time.perf_counter()) - self._began

    @property
    def sampled_seconds(self) -> float:
        """The time of all samples together."""
        return sum(sample.seconds for sample in self.samples.steps)

    @property
    def graphs(self) -> int:
        """How many graphs torch.compile has made since the beginning."""
        now = compiled_graphs() if self._graphs_at_end is None else self._graphs_at_end
        return now - self._graphs

    @property
    def active(self) -> bool:
        """Whether steps are recorded now."""
        return self._ended_at is None

    def start(self) -> Recording:
        """Begin: with the step that comes."""
        stack, overflows = self._stack, self._handle.overflows
        stack.callback(self._handle.on_step(self._guarded_stepped))
        stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
        overflows.listeners.append(self._overflowed)
        stack.callback(overflows.listeners.remove, self._overflowed)
        self._note_scale()
        if self._sample:
            self._hold()
            # Not before a model is called: what comes before is no step.
            self._handle.on_model(self._model_called)
            stack.callback(self._handle.on_model, None)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=functools.partial(_leave_in_child, weakref.ref(self)))
        return self

    def _end(self) -> None:
        self._end_sample("end")
        self._note_scale()
        self._note_skips()
        if self._held is not None:
            self._held.stop()
        self._ended_at, self._graphs_at_end = time.perf_counter(), compiled_graphs()
        self._stack.close()

    def leave(self) -> None:
        """Record no more, in a fork of the process that began."""
        running, self._running = self._running, None
        if running is not None:
            running[2].leave()
        self._sample = self.onlooker.sampling = False
        self._ended_at = time.perf_counter()

    # -- steps --

    def _model_called(self) -> None:
        # Between two steps a program may evaluate, which is no part of either. Before the first it may be all there is.
        if self.steps == 0 or torch.is_grad_enabled():
            self._handle.on_model(None)
            self._begin_sample()

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if self._check is not None and self.active and is_checked(self.steps):
            self._compare(self._check)
        if self._running is not None and self._running[1] == "values":
            self._running[2].read_gradients([p for group in optimizer.param_groups for p in group["params"]])

    def _guarded_stepped(self) -> None:
        if self._handle.optimizers.counts.steps == self._guarded_steps:
            # One that nobody guards, of which torch's hook has told.
            return
        self._guarded_steps = self._handle.optimizers.counts.steps
        self._after_step(guarded=True)

    def _stepped(self, *_: Any) -> None:
        # Of a guarded step the guard tells, skips included.
        if self._handle.optimizers.counts.steps == self._guarded_steps:
            self._after_step(guarded=False)

    def _after_step(self, *, guarded: bool) -> None:
        if self._handle.optimizers.rehearsal is not None or self._ended_at is not None:
            return
        self._note_skips()
        self.steps += 1
        self._note_scale()
        if self._running is not None:
            self._end_sample("step")
        if self._sample and plan(self.steps) is not None and self._running is None:
            # Within torch's hook of a step nothing may be installed.
            if guarded:
                self._hold()
            if self._held is not None:
                self._handle.on_model(self._model_called)
        elif guarded and self._running is None and self._held is not None:
            self._held.stop()
            self._held = None

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
        check, cause = self._check, cause_of(found)
        new = found.kind == HalfPrecisionOp.kind and cause not in self.entries
        if check is not None and new and len(self.entries) < _MOST_CAUSES:
            self.entries[cause] = self._tried(functools.partial(check.cure, found))

    # -- checks --

    def _compare(self, check: StepCheck) -> None:
        """Compare the step at hand with that in fp32."""
        if len(self.faults) >= _MOST_CAUSES:
            return
        if self._allowed() < 0:
            self.left_out += 1
            return
        began, unchecked = time.perf_counter(), self.unchecked
        fault = self._tried(lambda: check.look(self.steps))
        self.compared_seconds += time.perf_counter() - began
        self.compared += self.unchecked is unchecked
        if fault is not None and cause_of(fault.overflow) not in [cause_of(one.overflow) for one in self.faults]:
            self.faults.append(fault)

    def _tried(self, run: Callable[[], Any]) -> Any:
        """Return what a check finds; None where it cannot be made, of which the reason is kept."""
        try:
            return run()
        except Exception as error:
            # Whatever it is, the program goes on as without anybody who looks.
            self.unchecked = str(error) or type(error).__name__
            log.debug("a step could not be compared with fp32", exc_info=True)
            return None

    # -- samples --

    def _hold(self) -> None:
        """Let replacements stay those that tell of calls, so that a sample may end where nothing can be installed."""
        if self._held is None:
            self._held = self._handle.observe(self.onlooker)

    def _allowed(self) -> float:
        """Return how many seconds samples may still take."""
        running = 0.0 if self._running is None else time.perf_counter() - self._running[4]
        return _FREE + _PART * self.seconds - self.sampled_seconds - self.compared_seconds - running

    def _looking(self, kind: str) -> Any:
        """Return what looks at a step, for a ``with`` statement."""
        if kind == "values":
            return self._handle.look_at_values()
        if kind == "times":
            return CallTimes(self._handle.observe, self._handle.settings.device_type)
        return self._handle.trace()

    def _begin_sample(self) -> None:
        kind = plan(self.steps)
        # Modes of the program that it ends later would be ended in our place.
        if kind is None or dispatch_modes() or (kind == "times" and not self._times):
            return
        if self._allowed() < 0:
            self.left_out += 1
            return
        looking, began = self._looking(kind), time.perf_counter()
        try:
            looking.__enter__()
        except RuntimeError as error:
            self.trouble = f"step {self.steps} could not be looked at: {error}"
            log.debug("a step could not be looked at", exc_info=True)
            return
        self._running = self.steps, kind, looking, threading.get_ident(), began
        self.onlooker.begin()

    def _end_sample(self, why: str) -> None:
        if self._running is None:
            return
        step, kind, looking, thread, began = self._running
        if thread != threading.get_ident() or (kind != "times" and dispatch_modes() > 1):
            # Modes end in the thread and in the order in which they began.
            if why != "end":
                return
            self.trouble = f"step {step} was not looked at to its end, which another thread or mode was in the way of"
            self._running, self.onlooker.sampling = None, False
            return
        self._running, self.onlooker.sampling = None, False
        looking.__exit__(None, None, None)
        if kind == "values":
            self.samples.add_values(looking)
        elif kind == "times":
            self.samples.add_times(looking)
        else:
            self.samples.add_trace(looking)
        self.samples.add_modules(self.onlooker.roots)
        seconds = time.perf_counter() - began
        self.samples.steps.append(Sample(step, kind, seconds, whole=why != "limit"))


def _leave_in_child(recording: weakref.ref[Recording]) -> None:
    found = recording()
    if found is not None:
        found.leave()
