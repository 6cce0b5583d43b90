"""`autoamp tune` and `autoamp bisect`: they try changes of a program's lists on it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from autoamp.cli.output import say, writable
from autoamp.cli.program_runs import MetricUnknown, program_runs
from autoamp.errors import UsageError
from autoamp.rules import load_table, package_tables
from autoamp.tuning import Bisection, Search, Survey, list_text, proposals_of, units_of

# The part of the budget that the survey may take, half of it for the program and half for timing ops.
_SURVEY = 0.4
_NOT_RESTORED = (
    "the metric differs even with every surveyed module and op in fp32. The cause may be an op that runs after the "
    "surveyed steps (raise --survey-steps), a skipped step, or a model whose weights are in half precision"
)


def tune(chosen: argparse.Namespace) -> int:
    """Tune, write the list and print the result. Returns the exit code."""
    output = writable("--output", chosen.output)
    if output.exists():
        raise UsageError(
            f"--output {chosen.output!r} exists; move it away, because the runs would use it as the project's list"
        )
    if chosen.seeds < 1:
        raise UsageError("--seeds must be 1 or more")
    if not chosen.max_error >= 0:
        raise UsageError("--max-error must be 0 or more")
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    with program_runs(chosen) as runs:
        seconds = _SURVEY * runs.budget
        say(f"surveying {chosen.program} in fp32, for {seconds:.0f} s at most")
        survey = runs.survey(seconds / 2)
        proposals = proposals_of(survey, max_error=chosen.max_error)
        say(f"uses of ops: {len(survey.uses)}; changes to try: {len(proposals)}")
        search = Search(
            run=runs.run, seeds=seeds, tolerance=chosen.tolerance, proposals=proposals,
            higher_is_better=chosen.higher_is_better,
        )  # fmt: skip
        try:
            search.search()
        except MetricUnknown as error:
            say(f"{error}. Nothing was written", wrong=True)
            return 1
        lines = search.summary(survey, chosen.metric)
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
    """Return the lists that the runs used, as names for ``extends``."""
    base = "bf16" if survey.dtype == "bfloat16" else "default"
    sources = load_table(list(lists), base=base, device_type=survey.device_type).sources
    # Lists of packages lie over every base.
    packages = {str(package.file) for package, _ in package_tables()}
    shipped = [Path(source).stem for source in sources if source.startswith("lists/")]
    files = [source for source in sources if not source.startswith("lists/") and source not in packages]
    return [*(shipped[1:] or shipped), *(os.path.relpath(file, folder) for file in files)]


def bisect(chosen: argparse.Namespace) -> int:
    """Search, and print the lines for autoamp.toml on stdout, everything else on stderr. Returns the exit code."""
    with program_runs(chosen) as runs:
        say(f"surveying {chosen.survey_steps} steps of {chosen.program} in fp32")
        units = units_of(runs.survey(runs.budget / 2, timed=False))
        say(f"{len(units)} modules and ops are candidates")
        seeds = (chosen.seed, chosen.seed + 1)
        search = Bisection(run=runs.run, seeds=seeds, tolerance=chosen.tolerance, units=units)
        try:
            search.search()
        except MetricUnknown as error:
            say(str(error), wrong=True)
            return 1
    lines = search.figures(chosen.metric)
    if search.listed is not None:
        lines.append(f"allowed difference from fp32: {search.allowed:.3g}")
        if not search.is_wrong:
            lines.append("half precision is within the allowed difference: no rule has to change")
    lines.append(f"{runs.made} runs")
    if search.stopped is not None:
        lines.append(f"stopped early: {search.stopped}" + ("; fewer entries may be enough" if search.chosen else ""))
    elif search.is_wrong and not search.chosen:
        lines.append(_NOT_RESTORED)
    for line in lines:
        say(line)
    if search.chosen:
        sys.stdout.write(list_text(search.chosen, comments=lines))
    if search.stopped is not None:
        return search.stopped.exit_code
    return int(search.is_wrong and not search.chosen)
