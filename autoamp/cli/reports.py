"""`autoamp report`: the page of a run, or of two side by side, from the JSON that `autoamp run --report` wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

from autoamp.cli.output import say
from autoamp.diagnostics import failures, is_page, load_report, write_report
from autoamp.errors import UsageError

__all__ = ["FAILED", "report"]

FAILED = 3
"""The exit code where ``--fail-on`` found skips."""


def report(chosen: argparse.Namespace) -> int:
    """Write the page. Returns the exit code."""
    if len(chosen.runs) > 2:
        raise UsageError(f"autoamp report takes one run or two, and got {len(chosen.runs)}; give two files at most")
    if not is_page(chosen.output):
        raise UsageError(f"--output {chosen.output!r} must end in .html")
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
