"""`autoamp tune`: surveys a program, tries changes of its lists on it, and writes the list that came of it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from autoamp.cli.output import say, writable
from autoamp.cli.program_runs import MetricUnknown, program_runs
from autoamp.errors import UsageError
from autoamp.tuning import Search, Survey, list_text, proposals_of, summary_of

__all__ = ["tune"]

# The part of the budget that the survey may take, half of it for the program and half for timing ops.
_SURVEY = 0.4


def tune(chosen: argparse.Namespace) -> int:
    """Tune, write the list and print the result. Returns the exit code."""
    output = writable("--output", chosen.output)
    if output.exists():
        raise UsageError(
            f"--output {chosen.output!r} exists; move it away, because the runs would use it as the project's list"
        )
    if chosen.seeds < 1:
        raise UsageError("--seeds must be 1 or more")
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    with program_runs(chosen) as runs:
        seconds = _SURVEY * runs.budget
        say(f"surveying {chosen.program} in fp32, for {seconds:.0f} s at most")
        survey = runs.survey(seconds / 2)
        proposals = proposals_of(survey, max_error=chosen.max_error)
        say(f"{len(survey.uses)} uses of ops, {len(proposals)} changes to try")
        search = Search(runs.run, proposals, seeds, chosen.tolerance, chosen.higher_is_better)
        try:
            search.search()
        except MetricUnknown as error:
            say(f"{error}. Nothing was written", wrong=True)
            return 1
        lines = summary_of(survey, search, chosen.metric)
        extends = _extends(chosen.lists, survey, output.parent)
        text = list_text(search.chosen, extends, ["Written by autoamp tune.", *lines, ""])
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--output {chosen.output!r} cannot be written ({error}); give another file") from None
    for line in lines:
        say(line)
    say(f"{chosen.output}: {len(search.chosen)} entries")
    return 0 if search.stopped is None else search.stopped.exit_code


def _extends(lists: Sequence[str], survey: Survey, folder: Path) -> list[str]:
    """Return what the list says under ``extends``: nothing where it lies over what applies anyway."""
    if not lists:
        return []
    base = "bf16" if survey.dtype == "bfloat16" else "default"
    files = [os.path.relpath(name, folder) if os.path.exists(name) else name for name in lists]
    named = [name for name in lists if not os.path.exists(name)]
    return files if named else [base, *files]
