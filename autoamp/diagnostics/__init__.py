"""Looks on and changes nothing: observers of calls, counts, lists compared with the installed torch."""

from __future__ import annotations

from autoamp.diagnostics.call_sites import CallSite
from autoamp.diagnostics.counts import Counts, sum_of
from autoamp.diagnostics.drift import check_lists
from autoamp.diagnostics.observer import Call, Observation, Observer, Op, Watch

__all__ = ["Call", "CallSite", "Counts", "Observation", "Observer", "Op", "Watch", "check_lists", "sum_of"]
