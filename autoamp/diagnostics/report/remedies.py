"""The entries for a list file that a report suggests, each with its evidence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from autoamp.diagnostics.tables import counted


def remedies(overflows: Iterable[Mapping[str, Any]], table: Any) -> list[dict[str, Any]]:
    """Return entries for a list file: ``policy``, ``op``, ``evidence``, and ``now``, the rule in force.

    The policy is ``"fp32"``, or ``"modules"`` where ``op`` is a class of modules that is to run in fp32.

    Args:
        overflows: The faults and roundings of a report, and its groups of skips.
        table: The rules in force.
    """
    found: dict[str, dict[str, Any]] = {}
    for one in overflows:
        times = f"{counted(one['count'], 'skip')}; first: " if "count" in one else ""
        evidence = " ".join(f"{times}{one['sentence']}".split())
        finding = one.get("overflow", one) or {"fp32_names": (), "fp32_module": None}
        if (module := finding["fp32_module"]) is not None:
            entry = {"policy": "modules", "op": module, "evidence": evidence, "now": "as the rest of the list says"}
            found.setdefault(module, entry)
        for op in finding["fp32_names"]:
            rule = table.policy_of(op)
            now = "on no list" if rule is None else f"{rule.policy.value} by {rule.origin}"
            found.setdefault(op, {"policy": "fp32", "op": op, "evidence": evidence, "now": now})
    return list(found.values())


def as_toml(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a list file with these entries, each with its evidence as a comment; none without entries."""
    # A JSON string is a basic string of TOML. A comment holds no control characters.
    lines: dict[str, list[str]] = {"fp32": [], "modules": []}
    for one in entries:
        evidence = "".join(c if c.isprintable() else " " for c in one["evidence"])
        is_module = one["policy"] == "modules"
        text = f'{json.dumps(one["op"])} = "fp32"' if is_module else f"    {json.dumps(one['op'])},"
        lines[one["policy"]].append(f"{text}  # {evidence}")
    found = ["fp32 = [", *lines["fp32"], "]"] if lines["fp32"] else []
    found += ["[modules]", *lines["modules"]] if lines["modules"] else []
    return ["schema = 1", *found] if found else []
