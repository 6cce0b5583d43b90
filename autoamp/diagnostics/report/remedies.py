"""What a report suggests for the lists: lines of a list file, each with its evidence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["as_toml", "remedies"]

_UNPROFITABLE = "casts more than it computes"


def remedies(skips: Mapping[str, Any], hints: Iterable[Mapping[str, Any]], table: Any) -> list[dict[str, str]]:
    """Return entries for a list file, what is unsafe first: ``policy``, ``op``, ``evidence`` and the rule in force.

    Args:
        skips: Of a report, with groups by cause.
        hints: Of a cast trace, as plain values. One whose remedy is ``none = ['op']`` becomes an entry; what needs a
            decision, such as an fp32 island, stays a hint.
        table: The rules in force.
    """
    found: dict[str, dict[str, str]] = {}
    for group in skips["groups"]:
        overflow = group["overflow"]
        for name in overflow["fp32_names"] if group["kind"] == "half_precision_op" else ():
            times = f"{group['count']} skip{'s' if group['count'] > 1 else ''}; first: "
            # The entry itself is what the sentence suggests.
            cause = group["sentence"].removesuffix(f"; {overflow.get('suggestion')}")
            found.setdefault(name, _entry("fp32", name, times + cause, table))
    for hint in hints:
        op = hint["remedy"].partition("none = ['")[2].partition("']")[0]
        if hint["kind"] == _UNPROFITABLE and op and op not in found:
            found[op] = _entry("none", op, f"{hint['where']}: {hint['figure']}", table)
    return list(found.values())


def _entry(policy: str, op: str, evidence: str, table: Any) -> dict[str, str]:
    rule = table.policy_of(op)
    now = "on no list" if rule is None else f"{rule.policy.value} by {rule.origin}"
    return {"policy": policy, "op": op, "evidence": " ".join(evidence.split()), "now": now}


def as_toml(entries: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the lines of a list file with these entries, each with its evidence as a comment; none without entries."""
    by_policy: dict[str, list[Mapping[str, str]]] = {}
    for entry in entries:
        by_policy.setdefault(entry["policy"], []).append(entry)
    lines = ["schema = 1"] if by_policy else []
    for policy, several in by_policy.items():
        lines.append(f"{policy} = [")
        # What a JSON string escapes, a basic string of TOML escapes alike.
        lines += [f"    {json.dumps(one['op'])},  # {_comment(one['evidence'])}" for one in several]
        lines.append("]")
    return lines


def _comment(text: str) -> str:
    """Return a text without what a comment of TOML may not hold."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
