"""What a report suggests for the lists: lines of a list file, each with its evidence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoamp.diagnostics.rows import Hint
from autoamp.diagnostics.tables import counted

__all__ = ["as_toml", "contradicts", "remedies"]

_UNPROFITABLE = "casts more than it computes"


def remedies(
    overflows: Iterable[Mapping[str, Any]], hints: Iterable[Mapping[str, Any]], table: Any
) -> list[dict[str, Any]]:  # fmt: skip
    """Return entries for a list file, what is unsafe first: ``policy``, ``op``, ``of_module``, ``evidence``, ``now``.

    Args:
        overflows: Of a report: faults, and skips in groups by cause. Entries with which the step was run are taken.
        hints: Of a cast trace, as plain values. One whose remedy is ``none = ['op']`` becomes an entry; what needs a
            decision, such as an fp32 island, stays a hint.
        table: The rules in force.
    """
    found: dict[str, dict[str, Any]] = {}

    def add(policy: str, op: str, evidence: str, *, of_module: bool = False) -> None:
        rule = None if of_module else table.policy_of(op)
        now = "on no list" if rule is None else f"{rule.policy.value} by {rule.origin}"
        told = " ".join(evidence.split())
        found.setdefault(op, {"policy": policy, "op": op, "of_module": of_module, "evidence": told, "now": now})

    for one in overflows:
        times = f"{counted(one['count'], 'skip')}; first: " if "count" in one else ""
        entry = one["entry"] or {"names": (), "of_module": False}
        for name in entry["names"]:
            add("fp32", name, times + one["sentence"].partition("; with ")[0], of_module=entry["of_module"])
    for hint in hints:
        op = hint["remedy"].partition("none = ['")[2].partition("']")[0]
        if hint["kind"] == _UNPROFITABLE and op:
            add("none", op, f"{hint['where']}: {hint['figure']}")
    return list(found.values())


def contradicts(hint: Hint, overflows: Iterable[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a hint is on an op, a line or a class of modules that an entry against an overflow is on.

    Args:
        hint: Of a cast trace.
        overflows: Of a report.
        rows: Of the trace.
    """
    for one in overflows:
        entry, overflow = one["entry"], one["overflow"]
        if entry is None or overflow is None:
            continue
        classes = [name.rpartition(".")[2] for name in entry["names"]] if entry["of_module"] else []
        places = {overflow["location"]} | {row["location"] for row in rows if row["module_class"] in classes}
        if any(place is not None and f"({place})" in hint.where for place in places):
            return True
        if any(f"'{name}'" in hint.remedy for name in (*entry["names"], *overflow["fp32_names"])):
            return True
    return False


def as_toml(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a list file with these entries, each with its evidence as a comment; none without entries."""
    groups: dict[str, list[str]] = {}
    for one in entries:
        # What a JSON string escapes, a basic string of TOML escapes alike.
        op, evidence = json.dumps(one["op"]), f"  # {_comment(one['evidence'])}"
        if one["of_module"]:
            groups.setdefault("[modules]", []).append(f"{op} = {json.dumps(one['policy'])}{evidence}")
        else:
            groups.setdefault(one["policy"], []).append(f"    {op},{evidence}")
    lines = ["schema = 1"] if groups else []
    modules = groups.pop("[modules]", [])
    for policy, several in groups.items():
        lines += [f"{policy} = [", *several, "]"]
    # A table of TOML goes on to the end of the file.
    return [*lines, "[modules]", *modules] if modules else lines


def _comment(text: str) -> str:
    """Return a text without what a comment of TOML may not hold."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
