"""Rows of a profile of ranges by the name of the operator."""

from __future__ import annotations

from autoamp.diagnostics import OpRange, RangeProfile


def op(ranges: RangeProfile, name: str) -> OpRange:
    (found,) = [row for row in ranges.ops if row.op == f"aten::{name}"]
    return found
