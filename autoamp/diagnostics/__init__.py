"""Looks on and changes nothing: counts of calls and casts, lists compared with the installed torch."""

from __future__ import annotations

from autoamp.diagnostics.counts import Counts, counted, sum_of
from autoamp.diagnostics.drift import check_lists

__all__ = ["Counts", "check_lists", "counted", "sum_of"]
