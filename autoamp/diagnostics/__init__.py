"""Tools that observe a program and change no result: counts, traces, range profiles, explained overflows, reports."""

from __future__ import annotations

from autoamp.diagnostics.call_sites import CallSite as CallSite
from autoamp.diagnostics.call_sites import spellings as spellings
from autoamp.diagnostics.capsule import Capsule as Capsule
from autoamp.diagnostics.capsule import CapsuleWriter as CapsuleWriter
from autoamp.diagnostics.capsule import load_capsule as load_capsule
from autoamp.diagnostics.capsule import versions as versions
from autoamp.diagnostics.casts import CastTrace as CastTrace
from autoamp.diagnostics.casts import Counts as Counts
from autoamp.diagnostics.casts import Row as Row
from autoamp.diagnostics.casts import sum_of as sum_of
from autoamp.diagnostics.consistency import ComparedPath as ComparedPath
from autoamp.diagnostics.consistency import Consistency as Consistency
from autoamp.diagnostics.consistency import ConsistencyCheck as ConsistencyCheck
from autoamp.diagnostics.consistency import Difference as Difference
from autoamp.diagnostics.explain import Explanation as Explanation
from autoamp.diagnostics.explain import explain as explain
from autoamp.diagnostics.half_losses import HalfLosses as HalfLosses
from autoamp.diagnostics.monitors import Followers as Followers
from autoamp.diagnostics.monitors import write_scalars as write_scalars
from autoamp.diagnostics.observer import Call as Call
from autoamp.diagnostics.observer import Observation as Observation
from autoamp.diagnostics.observer import Observer as Observer
from autoamp.diagnostics.observer import Watch as Watch
from autoamp.diagnostics.overflow import OverflowTrace as OverflowTrace
from autoamp.diagnostics.ranges import Exponents as Exponents
from autoamp.diagnostics.ranges import OpRange as OpRange
from autoamp.diagnostics.ranges import RangeProfile as RangeProfile
from autoamp.diagnostics.report.document import failures as failures
from autoamp.diagnostics.report.document import report_of as report_of
from autoamp.diagnostics.report.page import check_report_tools as check_report_tools
from autoamp.diagnostics.report.page import is_page as is_page
from autoamp.diagnostics.report.page import load_report as load_report
from autoamp.diagnostics.report.page import report_page as report_page
from autoamp.diagnostics.report.page import write_report as write_report
from autoamp.diagnostics.report.recording import ReportRecording as ReportRecording
from autoamp.diagnostics.verdicts import Communication as Communication
from autoamp.diagnostics.verdicts import HalfPrecisionOp as HalfPrecisionOp
from autoamp.diagnostics.verdicts import NotFiniteInFp32 as NotFiniteInFp32
from autoamp.diagnostics.verdicts import NotLocated as NotLocated
from autoamp.diagnostics.verdicts import Overflow as Overflow
from autoamp.diagnostics.verdicts import OverflowVerdict as OverflowVerdict
from autoamp.diagnostics.verdicts import ScaleSearch as ScaleSearch
from autoamp.ops import check_lists as check_lists
