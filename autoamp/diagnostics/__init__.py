"""Tools that observe a program and change no result: counts, traces, range profiles, explained overflows, reports."""

from __future__ import annotations

from autoamp.diagnostics.call_sites import CallSite
from autoamp.diagnostics.capsule import Capsule, CapsuleWriter, load_capsule, versions
from autoamp.diagnostics.casts import CastTrace, Counts, Row, sum_of
from autoamp.diagnostics.consistency import ComparedPath, Consistency, ConsistencyCheck, Difference
from autoamp.diagnostics.explain import Explanation, explain
from autoamp.diagnostics.half_losses import HalfLosses
from autoamp.diagnostics.monitors import Followers, write_scalars
from autoamp.diagnostics.nonfinite import NonFiniteSteps
from autoamp.diagnostics.observer import Call, Observation, Observer, Watch
from autoamp.diagnostics.op_names import spellings
from autoamp.diagnostics.overflow import OverflowTrace
from autoamp.diagnostics.ranges import Exponents, OpRange, RangeProfile
from autoamp.diagnostics.report.document import failures, report_of
from autoamp.diagnostics.report.page import check_report_tools, is_page, load_report, report_page, write_report
from autoamp.diagnostics.report.recording import ReportRecording
from autoamp.diagnostics.verdicts import (
    Communication,
    HalfPrecisionOp,
    NotFiniteInFp32,
    NotLocated,
    Overflow,
    OverflowVerdict,
    ScaleSearch,
)
from autoamp.ops import check_lists

__all__ = [
    "Call",
    "CallSite",
    "Capsule",
    "CapsuleWriter",
    "CastTrace",
    "Communication",
    "ComparedPath",
    "Consistency",
    "ConsistencyCheck",
    "Counts",
    "Difference",
    "Explanation",
    "Exponents",
    "Followers",
    "HalfLosses",
    "HalfPrecisionOp",
    "NonFiniteSteps",
    "NotFiniteInFp32",
    "NotLocated",
    "Observation",
    "Observer",
    "OpRange",
    "Overflow",
    "OverflowTrace",
    "OverflowVerdict",
    "RangeProfile",
    "ReportRecording",
    "Row",
    "ScaleSearch",
    "Watch",
    "check_lists",
    "check_report_tools",
    "explain",
    "failures",
    "is_page",
    "load_capsule",
    "load_report",
    "report_of",
    "report_page",
    "spellings",
    "sum_of",
    "versions",
    "write_report",
    "write_scalars",
]
