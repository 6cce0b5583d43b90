"""Cost tables of programs with planted faults, and a program that behaves by them."""

from __future__ import annotations

import math
from typing import Any

from autoamp.tools.tuning import Outcome, Proposal, Survey
from autoamp.tools.tuning.model import Use


def use(target: str, policy: str, fp32: float, half: float, *, casts: float = 0.0, **fields: Any) -> Use:
    """Return a use whose variants take so many microseconds."""
    seconds = {"fp32": 1e-6 * fp32, "half": 1e-6 * half, "half_cast": 1e-6 * (half + casts)}
    largest = 17 if fields.get("overflow") else 0
    planted = {"calls": 1, "location": "net.py:7", "seconds": seconds, "error": 0.001, "largest": largest, **fields}
    return Use(target, policy, **planted)


def survey(*uses: Use, steps: int = 1) -> Survey:
    return Survey("cpu", "float16", steps, tuple(uses))


class Program:
    """Runs in no time: its loss is nan while an op that overflows is in half, and its steps take what the table says.

    Args:
        found: The table.
        fails: Changes as (name, value) that raise an exception.
        harms: Changes that are safe by the table, and take the metric out of tolerance.
    """

    def __init__(
        self, found: Survey, fails: set[tuple[str, str]] | None = None, harms: set[tuple[str, str]] | None = None
    ) -> None:
        self.found = found
        self.fails = fails or set()
        self.harms = harms or set()
        self.runs: list[tuple[tuple[tuple[str, str], ...] | None, int]] = []

    def __call__(self, candidate: tuple[Proposal, ...] | None, seed: int) -> Outcome:
        entries = None if candidate is None else {one.name: one.value for one in candidate}
        self.runs.append((None if entries is None else tuple(entries.items()), seed))
        pairs = set((entries or {}).items())
        if pairs & self.fails:
            return Outcome((math.nan,), failed="exit code 1: RuntimeError: expected Float")
        seconds, loss = 0.0, 0.5 + 0.001 * seed
        for one in self.found.uses:
            policy = "fp32" if entries is None else entries.get(one.target, one.policy)
            if entries is not None and one.module_class in entries:
                policy = entries[one.module_class]
            half = policy in ("fp16", "unlisted")
            loss = math.nan if half and one.overflow else loss
            seconds += one.total("half_cast" if half else "fp32") or 0.0
        return Outcome((loss + (1.0 if pairs & self.harms else 0.0),), seconds)
