"""`autoamp lists`: each rule with its origin, and the shipped lists compared with the installed torch."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from autoamp.cli import probes
from autoamp.cli.output import aligned
from autoamp.diagnostics import check_lists, explain
from autoamp.ops import known_ops
from autoamp.rules import check_bare_names

__all__ = ["add_lists"]


def add_lists(commands: Any) -> None:
    """Add the command ``lists`` to a parser's commands."""
    lists = commands.add_parser("lists", help="show each rule and where it comes from")
    lists.add_argument("ops", nargs="*", metavar="OP", help="only what applies to these, such as softmax")
    lists.add_argument("--set", default=None, help="a list set or file; default: what this project uses")
    lists.add_argument("--device-type", help="for which device: cuda, cpu, ...; the accelerator's unless given")
    lists.add_argument("--check", action="store_true",
                       help="compare the shipped sets with the installed torch; exit 1 where they differ")  # fmt: skip
    lists.set_defaults(act=_lists)


def _lists(chosen: argparse.Namespace) -> int:
    if chosen.check:
        drift = check_lists()
        sys.stdout.write("".join(f"{line}\n" for line in drift.lines()))
        if not drift:
            header = "its autocast header" if drift.header else "no autocast header, as it was installed without"
            sys.stdout.write(f"the shipped lists agree with torch {drift.torch}: its public names, {header}\n")
        return int(bool(drift))
    table = probes.default_table(chosen.set, chosen.device_type)
    if chosen.ops:
        sys.stdout.write("".join(f"{explain(table, name)}\n" for name in chosen.ops))
        return 0
    check_bare_names(table, known_ops())
    rows = sorted((rule.target, rule.policy.value, str(rule.origin)) for rule in table.rules)
    sys.stdout.write("".join(f"{line}\n" for line in aligned(rows)))
    return 0
