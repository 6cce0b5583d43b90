"""Which steps a recording looks at closely, and what it adds up of them."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from autoamp.diagnostics.call_sites import CallSite
from autoamp.diagnostics.counts import floating_tensors
from autoamp.diagnostics.exponents import Exponents
from autoamp.diagnostics.observer import Call, Observer, Watch
from autoamp.diagnostics.ranges import OpRange, RangeProfile
from autoamp.diagnostics.rows import Hint, Row
from autoamp.diagnostics.trace import CastTrace

__all__ = ["CallTime", "CallTimes", "Sample", "SampleObserver", "Samples", "is_checked", "plan"]

# A sample ends after so many calls of listed functions, or bytes of tensors that these got.
_MOST_CALLS = 5_000
_MOST_BYTES = 2**31
_MOST_MODULES = 20_000
_EVERY = 1000
_KINDS = ("casts", "times", "values")


def plan(step: int) -> str | None:
    """Return how the step of this number, from 0, is looked at: ``"casts"``, ``"times"``, ``"values"`` or not at all.

    ``"casts"`` is a cast trace, ``"times"`` the time of each call, ``"values"`` the exponents of values and gradients.
    Three steps in a row are looked at: from 0, 10 and 100 on, and from each 1000th on.
    """
    start = step if step < 3 else step - 10 if step < 13 else step - 100 if step < 103 else step % _EVERY
    return _KINDS[start] if 0 <= start < 3 and (step < 103 or step >= _EVERY) else None


def is_checked(step: int) -> bool:
    """Tell whether the step of this number, from 0, is compared with fp32: 0, 1, 4, 16 and so on."""
    return step == 0 or (step.bit_count() == 1 and step.bit_length() % 2 == 1)


class SampleObserver(Observer):
    """Notes in samples which models are called, and which calls of listed functions nothing is cast for.

    Args:
        device_type: Whose autocast is asked for.
        is_late: Tells whether the sample has taken its time.
        on_limit: Called once the sample has had as many calls or bytes as it may have, or its time.

    Attributes:
        roots: The outermost modules that were called.
        uncast: By reason and place how often a listed function was called with casts off.
        sampling: Whether a sample runs.
    """

    def __init__(self, device_type: str, is_late: Callable[[], bool], on_limit: Callable[[], object]) -> None:
        self.roots: weakref.WeakSet[Module] = weakref.WeakSet()
        self.uncast: Counter[tuple[str, str, str]] = Counter()
        self.sampling = False
        self._device_type = device_type
        self._is_late = is_late
        self._on_limit = on_limit
        self._calls = self._bytes = 0

    def begin(self) -> None:
        """Take note that a sample begins."""
        self.sampling, self._calls, self._bytes = True, 0, 0

    def before(self, call: Call) -> None:
        """Look at a call."""
        if not self.sampling:
            return
        if call.modules:
            self.roots.add(call.modules[0])
        if not call.casting and call.outer is None:
            inside = torch.is_autocast_enabled(self._device_type)
            why = "within torch.autocast" if inside else "with casts off"
            self.uncast[why, call.op.name, call.site.location or "-"] += 1
        self._calls += 1
        self._bytes += sum(tensor.nbytes for tensor in floating_tensors(call))
        over = self._calls >= _MOST_CALLS or self._bytes >= _MOST_BYTES or self._is_late()
        if over and call.outer is None:
            self._on_limit()


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


class CallTimes(Observer):
    """Times the calls of listed functions, within a ``with`` statement.

    Args:
        start: Begins to tell this observer of calls.
        device_type: Whose streams are asked for the time of a call; a CPU has none.

    Attributes:
        times: By the op, the policy and the place.
    """

    def __init__(self, start: Callable[[Observer], Watch], device_type: str) -> None:
        self.times: dict[Any, CallTime] = {}
        self._start = start
        self._device_type = device_type
        self._watch: Watch | None = None
        self._events: list[tuple[CallTime, Any, Any]] = []

    def __enter__(self) -> CallTimes:
        self._watch = self._start(self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.leave()
        for known, begin, end in self._events:
            end.synchronize()
            known.device_us = (known.device_us or 0.0) + 1e3 * begin.elapsed_time(end)
        self._events.clear()

    def leave(self) -> None:
        """Look on no more."""
        if self._watch is not None:
            self._watch.stop()

    def before(self, call: Call) -> Any:
        """Begin to time a call."""
        if not call.casting or not floating_tensors(call):
            return None
        key = call.op.name, call.op.policy.value, call.site
        known = self.times.setdefault(key, CallTime())
        return known, self._event(), time.perf_counter()

    def after(self, call: Call, state: Any, result: Any) -> None:
        """Add the time of a call."""
        now = time.perf_counter()
        if state is None:
            return
        known, begin, began = state
        known.calls += 1
        known.cpu_us += 1e6 * (now - began)
        end = None if begin is None else self._event()
        if end is not None:
            self._events.append((known, begin, end))

    def _event(self) -> Any:
        """Return an event that was recorded now; None on a CPU, and while a graph is captured."""
        if self._device_type == "cpu" or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return None
        event = torch.Event(self._device_type, enable_timing=True)
        event.record()
        return event


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


class Samples:
    """The sums of all samples of a recording.

    Attributes:
        steps: Which steps were looked at, and how: the step, the kind, seconds, and whether to its end.
        rows, unlisted: As in `CastTrace`, added up over the samples.
        hints: The hints of the last trace that had each.
        times: By row the time of calls, in samples of their own.
        ops: As in `RangeProfile`.
        gradients: By parameter.
        modules: By the class of the outermost module and the path: the class, the parameters' elements and dtypes.
    """

    def __init__(self) -> None:
        self.steps: list[Sample] = []
        self.rows: dict[Any, Row] = {}
        self.unlisted: dict[Any, Row] = {}
        self.hints: dict[tuple[str, str], Hint] = {}
        self.times: dict[Any, CallTime] = {}
        self.ops: dict[tuple[str, str | None, CallSite], OpRange] = {}
        self.gradients: dict[str, Exponents] = {}
        self.modules: dict[tuple[str, str], dict[str, Any]] = {}

    def add_trace(self, trace: CastTrace) -> None:
        """Add what was traced."""
        for into, rows in ((self.rows, trace.rows), (self.unlisted, trace.unlisted)):
            for row in rows:
                key = row.op, row.policy, row.site
                if key in into:
                    _add_row(into[key], row)
                else:
                    into[key] = row
        self.hints.update({(hint.kind, hint.where): hint for hint in trace.hints})

    def add_times(self, found: CallTimes) -> None:
        """Add the times of calls."""
        for key, more in found.times.items():
            known = self.times.setdefault(key, CallTime())
            known.calls += more.calls
            known.cpu_us += more.cpu_us
            if more.device_us is not None:
                known.device_us = (known.device_us or 0.0) + more.device_us

    def add_values(self, profile: RangeProfile) -> None:
        """Add the exponents of a step."""
        for op in profile.ops:
            known = self.ops.setdefault((op.op, op.within, op.site), op)
            if known is not op:
                known.calls += op.calls
                known.values.include(op.values)
        for name, found in profile.gradients.items():
            self.gradients.setdefault(name, Exponents()).include(found)

    def add_modules(self, roots: Iterable[Module]) -> None:
        """Note the modules within these that are not known yet."""
        for root in roots:
            kind = type(root).__name__
            for path, module in root.named_modules():
                if len(self.modules) >= _MOST_MODULES or (kind, path) in self.modules:
                    continue
                own = list(module.parameters(recurse=False))
                self.modules[kind, path] = {
                    "class": type(module).__name__,
                    "elements": sum(parameter.numel() for parameter in own),
                    "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in own}),
                    "scripted": isinstance(module, torch.jit.ScriptModule),
                }


def _add_row(known: Row, row: Row) -> None:
    for name in ("calls", "casts", "spared", "bytes_cast", "elements_cast", "work"):
        setattr(known, name, getattr(known, name) + getattr(row, name))
    known.exact = known.exact and row.exact
    for mine, other in ((known.dtypes_in, row.dtypes_in), (known.dtypes_out, row.dtypes_out)):
        for dtype, count in other.items():
            mine[dtype] = mine.get(dtype, 0) + count
