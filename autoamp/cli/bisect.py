"""`autoamp bisect`: find the rules that must be fp32 to restore a program's metric."""

from __future__ import annotations

import argparse
import sys

from autoamp.cli.output import say
from autoamp.cli.program_runs import MetricUnknown, program_runs
from autoamp.tuning import Bisection, Outcome, list_text, units_of

_NOT_RESTORED = (
    "the metric differs even with every surveyed module and op in fp32. The cause may be an op that runs after the "
    "surveyed steps (raise --survey-steps), a skipped step, or a model whose weights are in half precision"
)


def bisect(chosen: argparse.Namespace) -> int:
    """Search, and print the lines for autoamp.toml on stdout, everything else on stderr. Returns the exit code."""
    with program_runs(chosen) as runs:
        say(f"surveying {chosen.survey_steps} steps of {chosen.program} in fp32")
        units = units_of(runs.survey(runs.budget / 2, timed=False))
        say(f"{len(units)} modules and ops are candidates")
        search = Bisection(runs.run, units, chosen.seed, chosen.tolerance)
        try:
            search.search()
        except MetricUnknown as error:
            say(str(error), wrong=True)
            return 1
    lines = _summary(search, chosen.metric, runs.made)
    for line in lines:
        say(line)
    if search.culprits:
        entries = {one.name: one for unit in search.culprits for one in unit}
        sys.stdout.write(list_text(list(entries.values()), comments=lines))
    if search.stopped is not None:
        return search.stopped.exit_code
    return int(_is_wrong(search) and not search.culprits)


def _is_wrong(search: Bisection) -> bool:
    """Return whether the metric in half precision differs from fp32."""
    return search.half is not None and not search.is_restored(search.half)


def _summary(search: Bisection, metric: str, runs: int) -> list[str]:
    """Return the result as lines of text."""
    fp32 = Outcome(search.fp32[0]) if search.fp32 else None
    named = [("in fp32", fp32), ("in half precision", search.half), ("with these entries", search.restored)]
    lines = [f"{metric} {where}: {_shown(outcome)}" for where, outcome in named if outcome is not None]
    if search.half is not None:
        lines.append(f"allowed difference from fp32: {search.allowed:.3g}")
        if not _is_wrong(search):
            lines.append("half precision is within the allowed difference: no rule has to change")
    lines.append(f"{runs} runs")
    if search.stopped is not None:
        lines.append(f"stopped early: {search.stopped}" + ("; fewer entries may be enough" if search.culprits else ""))
    elif _is_wrong(search) and not search.culprits:
        lines.append(_NOT_RESTORED)
    return lines


def _shown(outcome: Outcome) -> str:
    if outcome.failed is not None:
        return f"the program failed: {outcome.failed}"
    return "none" if outcome.metric is None else f"{outcome.metric:.6g}"
