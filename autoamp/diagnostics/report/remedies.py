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
    for one in overflows:
        entry = one["entry"]
        if entry is None:
            continue
        times = f"{counted(one['count'], 'skip')}; first: " if "count" in one else ""
        cause = one["sentence"].partition("; with ")[0]
        for name in entry["names"]:
            found.setdefault(name, _entry("fp32", name, times + cause, table, of_module=entry["of_module"]))
    for hint in hints:
        op = hint["remedy"].partition("none = ['")[2].partition("']")[0]
        if hint["kind"] == _UNPROFITABLE and op and op not in found:
            found[op] = _entry("none", op, f"{hint['where']}: {hint['figure']}", table)
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


def _entry(policy: str, op: str, evidence: str, table: Any, *, of_module: bool = False) -> dict[str, Any]:
    rule = None if of_module else table.policy_of(op)
    now = "on no list" if rule is None else f"{rule.policy.value} by {rule.origin}"
    return {"policy": policy, "op": op, "of_module": of_module, "evidence": " ".join(evidence.split()), "now": now}


def as_toml(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a list file with these entries, each with its evidence as a comment; none without entries."""
    by_policy: dict[str, list[Mapping[str, Any]]] = {}
    modules = []
    for entry in entries:
        if entry["of_module"]:
            modules.append(entry)
        else:
            by_policy.setdefault(entry["policy"], []).append(entry)
    lines = ["schema = 1"] if by_policy or modules else []
    for policy, several in by_policy.items():
        lines.append(f"{policy} = [")
        # What a JSON string escapes, a basic string of TOML escapes alike.
        lines += [f"    {json.dumps(one['op'])},  # {_comment(one['evidence'])}" for one in several]
        lines.append("]")
    if modules:
        lines.append("[modules]")
        lines += [
            f"{json.dumps(one['op'])} = {json.dumps(one['policy'])}  # {_comment(one['evidence'])}" for one in modules
        ]
    return lines


def _comment(text: str) -> str:
    """Return a text without what a comment of TOML may not hold."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
