"""`autoamp tune`: surveys a program, tries changes of its lists on it, and writes the list that came of it."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from autoamp.cli.output import say, writable
from autoamp.cli.program_runs import exit_code_of, handled, program_runs, seconds_of, why_unknown
from autoamp.errors import UsageError
from autoamp.tuning import Search, Survey, list_text, proposals_of, summary_of, write_list

__all__ = ["tune"]

# What of the budget the survey may take, half of it for the program and half for timing ops.
_SURVEY = 0.4


def tune(chosen: argparse.Namespace) -> int:
    """Tune, write the list and print what was found. Returns the exit code."""
    output = writable("--output", chosen.output)
    if output.exists():
        raise UsageError(
            f"--output {chosen.output!r} exists; move it away, because the runs would use it as the project's list"
        )
    if chosen.seeds < 1:
        raise UsageError("--seeds must be 1 or more")
    seeds = [chosen.seed + number for number in range(chosen.seeds)]
    with program_runs(chosen) as runs:
        seconds = _SURVEY * seconds_of(chosen.budget)
        say(f"surveying {chosen.program} in fp32, for {seconds:.0f} s at most")
        survey = runs.survey(seconds / 2)
        proposals = proposals_of(survey, max_error=chosen.max_error)
        say(f"{len(survey.uses)} uses of ops, {len(proposals)} changes to try")
        search = Search(
            runs.run, proposals, seeds, tolerance=chosen.tolerance, higher_is_better=chosen.higher_is_better
        )
        result = search.search()
    if result.fp32 is not None and (unknown := why_unknown(result.fp32.outcomes, runs, chosen.metric)) is not None:
        say(f"{unknown}. Nothing was written", wrong=True)
        return 1
    lines = summary_of(survey, result, seeds, chosen.metric)
    extends = _extends(chosen.lists, survey, output.parent)
    # A second signal, of a user in a hurry, does not leave half of it.
    with handled(signal.SIGINT, signal.SIG_IGN), handled(signal.SIGTERM, signal.SIG_IGN):
        write_list(output, list_text(result.chosen, extends, ["Written by autoamp tune.", *lines, ""]))
    for line in lines:
        say(line)
    say(f"{chosen.output}: {len(result.chosen)} entries")
    return exit_code_of(result.stopped)


def _extends(lists: Sequence[str], survey: Survey, folder: Path) -> list[str]:
    """Return what the list says under ``extends``: nothing where it lies over what applies anyway."""
    if not lists:
        return []
    base = "bf16" if survey.dtype == "bfloat16" else "default"
    files = [os.path.relpath(name, folder) if os.path.exists(name) else name for name in lists]
    named = [name for name in lists if not os.path.exists(name)]
    return files if named else [base, *files]
