"""The steps that a recording samples, and what it adds up of them."""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from autoamp.diagnostics.counts import floating_tensors
from autoamp.diagnostics.observer import Call, Observer, Watch
from autoamp.diagnostics.ranges import ValueProfile
from autoamp.diagnostics.trace import CastTrace
from autoamp.torch_private import dispatch_modes

__all__ = ["Allowance", "CallTime", "Sample", "Samples", "plan"]

log = logging.getLogger(__name__)

# A sample ends after so many calls of listed functions, or bytes of tensors that these got.
_MOST_CALLS = 5_000
_MOST_BYTES = 2**31
_MOST_MODULES = 20_000
# Samples and comparisons together may take so many seconds, and so much of the time since the beginning.
_FREE, _PART = 2.0, 0.1
_EVERY = 1000
_KINDS = ("casts", "times", "values")


def plan(step: int) -> str | None:
    """Return what is sampled of the step of this number, from 0: ``"casts"``, ``"times"``, ``"values"`` or None.

    ``"casts"`` is a cast trace, ``"times"`` the time of each call, ``"values"`` the exponents of values and gradients.
    Three steps in a row are sampled: from 0, 10 and 100 on, and from each 1000th on.
    """
    start = step if step < 3 else step - 10 if step < 13 else step - 100 if step < 103 else step % _EVERY
    return _KINDS[start] if 0 <= start < 3 and (step < 103 or step >= _EVERY) else None


class Allowance:
    """The time that a recording may take from the program: 2 s, and a tenth of the time since it began.

    Attributes:
        began: When it began, by `time.perf_counter`.
        spent: The seconds that were taken.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.spent = 0.0

    def left(self) -> float:
        """Return the seconds that may still be taken; below 0 where it was more."""
        return _FREE + _PART * (time.perf_counter() - self.began) - self.spent


@dataclass
class CallTime:
    """The time of the calls of one op at one place.

    Attributes:
        calls: How many were timed.
        cpu_us: Microseconds until they returned.
        device_us: Microseconds of an accelerator's stream, from before the calls to their end; None on a CPU.
    """

    calls: int = 0
    cpu_us: float = 0.0
    device_us: float | None = None


class Sample(NamedTuple):
    """One look at a step.

    Attributes:
        step: Its number.
        kind: One that `plan` returns.
        seconds: How long it took, with the program's own time.
        whole: Whether it went on to the end of the step.
    """

    step: int
    kind: str
    seconds: float
    whole: bool


@dataclass
class _Running:
    """A sample that runs: its outermost modules, what it has seen so far, and events to read at its end."""

    step: int
    kind: str
    roots: weakref.WeakSet[Module] = field(default_factory=weakref.WeakSet)
    calls: int = 0
    bytes: int = 0
    events: list[tuple[CallTime, Any, Any]] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)
    began: float = field(default_factory=time.perf_counter)


class Samples(Observer):
    """Samples some steps, and adds up their casts, times and values.

    It stays an observer between two sampled steps: a sample may end in torch's hook of a step, where no replacement can
    be installed.

    Args:
        handle: Whose run it is.
        allowance: The time that may be taken.
        timed: Whether calls are timed.

    Attributes:
        steps: The samples so far.
        trace: The casts of all samples of kind ``"casts"``.
        values: The exponents of all samples of kind ``"values"``.
        times: By op, policy and place the times of all samples of kind ``"times"``.
        modules: By the class of the outermost module and the path: the class, the parameters' elements and dtypes.
        uncast: By reason, op and place how often a listed function was called with casts off.
        left_out: How many samples were not taken, as those before had taken the time for them.
        trouble: Why the last step that could not be sampled was not; None where all were.
    """

    def __init__(self, handle: Any, allowance: Allowance, *, timed: bool = True) -> None:
        self.steps: list[Sample] = []
        self.trace = CastTrace(handle.casts, handle.observation, handle.observe)
        self.values = ValueProfile(handle.observation, handle.observe)
        self.times: dict[Any, CallTime] = {}
        self.modules: dict[tuple[str, str], dict[str, Any]] = {}
        self.uncast: Counter[tuple[str, str, str]] = Counter()
        self.left_out = 0
        self.trouble: str | None = None
        self._handle = handle
        self._allowance = allowance
        self._timed = timed
        self._running: _Running | None = None
        self._watch: Watch | None = None

    # -- steps --

    def await_step(self, step: int, *, may_install: bool = True) -> None:
        """Begin a sample at the next call of a model, if the coming step is to be sampled.

        Args:
            step: Its number.
            may_install: Whether replacements may be installed now.
        """
        if self._running is not None:
            return
        wanted = plan(step) is not None
        if may_install and wanted and self._watch is None:
            self._watch = self._handle.observe(self)
        elif may_install and not wanted and self._watch is not None:
            self.stop()
        if wanted and self._watch is not None:
            # Not before a model is called: what comes before is no step.
            self._handle.observation.on_model = functools.partial(self._model_called, step)

    def _model_called(self, step: int) -> None:
        # Between two steps a program may evaluate, which is no part of either. Before the first it may be all there is.
        if step == 0 or torch.is_grad_enabled():
            self._handle.observation.on_model = None
            self._begin(step)

    def before_step(self, optimizer: Any) -> None:
        """Count the exponents of the gradients that an optimizer is about to use, in samples of values."""
        if self._running is not None and self._running.kind == "values":
            self.values.read_gradients([param for group in optimizer.param_groups for param in group["params"]])

    def stop(self) -> None:
        """Stop observing."""
        self._handle.observation.on_model = None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    # -- samples --

    def _looking(self, kind: str) -> Any:
        return {"casts": self.trace, "values": self.values}.get(kind)

    def _begin(self, step: int) -> None:
        kind = plan(step)
        # Modes of the program that it ends later would be ended in our place.
        if kind is None or dispatch_modes() or (kind == "times" and not self._timed):
            return
        if self._allowance.left() < 0:
            self.left_out += 1
            return
        running, looking = _Running(step, kind), self._looking(kind)
        try:
            if looking is not None:
                looking.__enter__()
        except RuntimeError as error:
            self.trouble = f"step {step} could not be looked at: {error}"
            log.debug("a step could not be looked at", exc_info=True)
            return
        self._running = running

    def end(self, why: str) -> None:
        """End the sample that runs, if any.

        Args:
            why: ``"step"``: the step has ended. ``"limit"``: before that. ``"end"``: so has the recording.
        """
        running = self._running
        if running is None:
            return
        if running.thread != threading.get_ident() or (running.kind != "times" and dispatch_modes() > 1):
            # Modes end in the thread and in the order in which they began.
            if why == "end":
                self.trouble = f"step {running.step} was not looked at to its end: another thread or mode runs"
                self._running = None
            return
        self._running = None
        if (looking := self._looking(running.kind)) is not None:
            looking.__exit__(None, None, None)
        for known, begin, end in running.events:
            end.synchronize()
            known.device_us = (known.device_us or 0.0) + 1e3 * begin.elapsed_time(end)
        self._note_modules(running.roots)
        seconds = time.perf_counter() - running.began
        self._allowance.spent += seconds
        self.steps.append(Sample(running.step, running.kind, seconds, whole=why != "limit"))

    def _note_modules(self, roots: weakref.WeakSet[Module]) -> None:
        for root in roots:
            for path, module in root.named_modules():
                key = type(root).__name__, path
                if len(self.modules) < _MOST_MODULES and key not in self.modules:
                    own = list(module.parameters(recurse=False))
                    self.modules[key] = {
                        "class": type(module).__name__,
                        "elements": sum(parameter.numel() for parameter in own),
                        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in own}),
                        "scripted": isinstance(module, torch.jit.ScriptModule),
                    }

    # -- calls --

    def before(self, call: Call) -> Any:
        """Look at a call; return what begins to time it, in samples of that kind."""
        running = self._running
        if running is None:
            return None
        if call.modules:
            running.roots.add(call.modules[0])
        if not call.casting and call.outer is None:
            inside = torch.is_autocast_enabled(self._handle.settings.device_type)
            why = "within torch.autocast" if inside else "with casts off"
            self.uncast[why, call.op.name, call.site.location or "-"] += 1
        tensors = floating_tensors(call)
        running.calls += 1
        running.bytes += sum(tensor.nbytes for tensor in tensors)
        late = time.perf_counter() - running.began > self._allowance.left()
        if call.outer is None and (running.calls >= _MOST_CALLS or running.bytes >= _MOST_BYTES or late):
            self.end("limit")
        elif running.kind == "times" and call.casting and tensors:
            known = self.times.setdefault((call.op.name, call.op.policy.value, call.site), CallTime())
            return known, running.events, self._event(), time.perf_counter()
        return None

    def after(self, call: Call, state: Any, result: Any) -> None:
        """Add the time of a call."""
        now = time.perf_counter()
        if state is not None:
            known, events, begin, began = state
            known.calls += 1
            known.cpu_us += 1e6 * (now - began)
            if begin is not None and (end := self._event()) is not None:
                events.append((known, begin, end))

    def _event(self) -> Any:
        """Return an event that was recorded now; None on a CPU, and while a graph is captured."""
        device = self._handle.settings.device_type
        if device == "cpu" or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return None
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event
