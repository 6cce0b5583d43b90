"""What a report suggests for the lists: lines of a list file, each with its evidence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from autoamp.diagnostics.rows import Hint
from autoamp.diagnostics.tables import counted

__all__ = ["as_toml", "contradicts", "remedies"]

_UNPROFITABLE = "casts more than it computes"


def remedies(
    overflows: Iterable[Mapping[str, Any]], hints: Iterable[Mapping[str, Any]], table: Any
) -> list[dict[str, Any]]:  # fmt: skip
    """Return entries for a list file, what is unsafe first: ``policy``, ``op``, ``evidence``, ``now``.

    Args:
        overflows: Of a report: faults, and skips in groups by cause.
        hints: Of a cast trace, as plain values. One whose remedy is ``none = ['op']`` becomes an entry; what needs a
            decision, such as an fp32 island, stays a hint.
        table: The rules in force.
    """
    found: dict[str, dict[str, Any]] = {}

    def add(policy: str, op: str, evidence: str) -> None:
        rule = table.policy_of(op)
        now = "on no list" if rule is None else f"{rule.policy.value} by {rule.origin}"
        found.setdefault(op, {"policy": policy, "op": op, "evidence": " ".join(evidence.split()), "now": now})

    for one in overflows:
        times = f"{counted(one['count'], 'skip')}; first: " if "count" in one else ""
        for name in _names(one):
            add("fp32", name, times + one["sentence"])
    for hint in hints:
        op = hint["remedy"].partition("none = ['")[2].partition("']")[0]
        if hint["kind"] == _UNPROFITABLE and op:
            add("none", op, f"{hint['where']}: {hint['figure']}")
    return list(found.values())


def _names(one: Mapping[str, Any]) -> list[str]:
    return [] if one["overflow"] is None else list(one["overflow"]["fp32_names"])


def contradicts(hint: Hint, overflows: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether a hint is on an op or a line that an entry against an overflow is on.

    Args:
        hint: Of a cast trace.
        overflows: Of a report.
    """
    for one in overflows:
        names = _names(one)
        place = one["overflow"]["location"] if names else None
        if (place is not None and f"({place})" in hint.where) or any(f"'{name}'" in hint.remedy for name in names):
            return True
    return False


def as_toml(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a list file with these entries, each with its evidence as a comment; none without entries."""
    groups: dict[str, list[str]] = {}
    for one in entries:
        # What a JSON string escapes, a basic string of TOML escapes alike.
        line = f"    {json.dumps(one['op'])},  # {_comment(one['evidence'])}"
        groups.setdefault(one["policy"], []).append(line)
    lines = ["schema = 1"] if groups else []
    for policy, several in groups.items():
        lines += [f"{policy} = [", *several, "]"]
    return lines


def _comment(text: str) -> str:
    """Return a text without what a comment of TOML may not hold."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
