"""Which steps a recording looks at closely, and what it adds up of them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Module

from autoamp.diagnostics.call_sites import CallSite
from autoamp.diagnostics.exponents import Exponents
from autoamp.diagnostics.observer import Call, Observer
from autoamp.diagnostics.ranges import OpRange, RangeProfile
from autoamp.diagnostics.rows import Hint, Row
from autoamp.diagnostics.trace import CastTrace

__all__ = ["Onlooker", "Samples", "plan"]

# A sample of a step that does not end, as where a program only evaluates, ends after so many calls.
MOST_CALLS = 20_000
_MOST_MODULES = 20_000
_EVERY = 1000


def plan(step: int) -> str | None:
    """Return how the step of this number, from 0, is looked at: ``"casts"``, ``"times"``, ``"values"`` or not at all.

    ``"casts"`` is a cast trace, ``"times"`` one with torch.profiler, ``"values"`` the exponents of values and
    gradients. The first step has no times, since much is done in it once. After the 1000th two of 1000 are looked at.
    """
    if step < 3:
        return ("casts", "times", "values")[step]
    for base in (10, 100, _EVERY):
        if step in (base, base + 1):
            return "times" if step == base else "values"
    within = step % _EVERY
    return {0: "times", 1: "values"}.get(within) if step > _EVERY else None


class Onlooker(Observer):
    """Notes in samples which models are called, and which calls of listed functions nothing is cast for.

    Args:
        device_type: Whose autocast is asked for.
        on_limit: Called once the sample has had as many calls as it may have.

    Attributes:
        roots: The outermost modules that were called.
        uncast: By reason and place how often a listed function was called with casts off.
        sampling: Whether a sample runs.
    """

    def __init__(self, device_type: str, on_limit: Callable[[], object]) -> None:
        self.roots: weakref.WeakSet[Module] = weakref.WeakSet()
        self.uncast: Counter[tuple[str, str, str]] = Counter()
        self.sampling = False
        self._device_type = device_type
        self._on_limit = on_limit
        self._calls = 0

    def begin(self) -> None:
        """Take note that a sample begins."""
        self.sampling, self._calls = True, 0

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
        if self._calls >= MOST_CALLS and call.outer is None:
            self._on_limit()


class Samples:
    """The sums of all samples of a recording.

    Attributes:
        steps: Which steps were looked at, and how: ``(step, kind)``.
        rows, unlisted: As in `CastTrace`, added up over the samples.
        hints: The hints of the last trace that had each.
        timed: How many calls of each row torch.profiler timed.
        ops: As in `RangeProfile`.
        gradients: By parameter.
        modules: By the class of the outermost module and the path: the class, the parameters' elements and dtypes.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, str]] = []
        self.rows: dict[Any, Row] = {}
        self.unlisted: dict[Any, Row] = {}
        self.hints: dict[tuple[str, str], Hint] = {}
        self.timed: Counter[Any] = Counter()
        self.ops: dict[tuple[str, str | None, CallSite], OpRange] = {}
        self.gradients: dict[str, Exponents] = {}
        self.modules: dict[tuple[str, str], dict[str, Any]] = {}

    def add_trace(self, trace: CastTrace) -> None:
        """Add what was traced."""
        for into, rows in ((self.rows, trace.rows), (self.unlisted, trace.unlisted)):
            for row in rows:
                key = row.op, row.policy, row.site
                if row.cpu_us is not None:
                    self.timed[key] += row.calls
                if key in into:
                    _add_row(into[key], row)
                else:
                    into[key] = row
        self.hints.update({(hint.kind, hint.where): hint for hint in trace.hints})

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
    for name in ("cpu_us", "device_us"):
        more = getattr(row, name)
        if more is not None:
            setattr(known, name, (getattr(known, name) or 0.0) + more)
