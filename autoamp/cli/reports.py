"""`autoamp report`: the page of a run, or of two side by side, from the JSON that `autoamp run --report` wrote."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autoamp.cli.output import say
from autoamp.diagnostics import failures, is_page, load_report, write_report
from autoamp.errors import UsageError

__all__ = ["FAILED", "add_report"]

FAILED = 3
"""The exit code where ``--fail-on`` found skips."""


def add_report(commands: Any) -> None:
    """Add the command ``report`` to a parser's commands."""
    report = commands.add_parser(
        "report",
        help="make a page of a run's report, or of two runs side by side",
        description="Makes a page of HTML of what autoamp run --report FILE.json wrote, of one run or two.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN.json", help="one file, or two")
    report.add_argument("-o", "--output", default="report.html", metavar="FILE.html", help="default: report.html")
    report.add_argument(
        "--fail-on",
        choices=["overflow", "skip"],
        help="end with exit code 3 where a run has such skips; see autoamp run",
    )
    report.set_defaults(act=_report)


def _report(chosen: argparse.Namespace) -> int:
    if len(chosen.runs) > 2:
        raise UsageError(f"autoamp report takes one run or two, and got {len(chosen.runs)}; give two files at most")
    if not is_page(chosen.output):
        raise UsageError(f"--output {chosen.output!r} is no page; give a name that ends in .html")
    runs = [load_report(path) for path in chosen.runs]
    names = [Path(path).name for path in chosen.runs] if len(runs) > 1 else []
    write_report(chosen.output, runs, names)
    say(f"wrote {chosen.output}")
    failed = False
    for path, run in zip(chosen.runs, runs, strict=True):
        for line in failures(run, chosen.fail_on) if chosen.fail_on else ():
            failed = True
            say(f"{path}: {line}")
    return FAILED if failed else 0
