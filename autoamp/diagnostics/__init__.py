"""Looks on and changes nothing: observers of calls, counts, lists compared with the installed torch."""

from __future__ import annotations

from autoamp.diagnostics.call_sites import CallSite
from autoamp.diagnostics.counts import Counts, sum_of
from autoamp.diagnostics.drift import check_lists
from autoamp.diagnostics.explain import Explanation, explain
from autoamp.diagnostics.exponents import FORMATS, Exponents
from autoamp.diagnostics.observer import Call, Observation, Observer, Op, Watch
from autoamp.diagnostics.ranges import OpRange, RangeProfile
from autoamp.diagnostics.rows import Hint, Row
from autoamp.diagnostics.tables import as_csv, as_table
from autoamp.diagnostics.trace import CastTrace

__all__ = [
    "FORMATS",
    "Call",
    "CallSite",
    "CastTrace",
    "Counts",
    "Explanation",
    "Exponents",
    "Hint",
    "Observation",
    "Observer",
    "Op",
    "OpRange",
    "RangeProfile",
    "Row",
    "Watch",
    "as_csv",
    "as_table",
    "check_lists",
    "explain",
    "sum_of",
]
