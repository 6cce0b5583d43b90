"""A search's result as text: a list file, each entry with its reason as a comment, and a summary."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence

from autoamp.tuning.model import NOISE, Proposal, Survey
from autoamp.tuning.search import ProgramSearch, Search


def list_text(proposals: Sequence[Proposal], extends: Sequence[str] = (), comments: Sequence[str] = ()) -> str:
    """Return a list file with these entries.

    Args:
        proposals: The entries, each with its reason.
        extends: The sets and files that it is based on; none for those that apply anyway.
        comments: Lines for its head.
    """
    lines = [_comment(line) for line in comments]
    lines += ["schema = 1"]
    if extends:
        lines.append(f"extends = [{', '.join(map(_string, extends))}]")
    ordered = sorted(proposals, key=operator.attrgetter("name"))
    for policy in ("fp16", "fp32"):
        entries = [one for one in ordered if one.value == policy and not one.of_module]
        if entries:
            lines += ["", f"{policy} = [", *(f"    {_string(one.name)},  {_reason(one)}" for one in entries), "]"]
    modules = [one for one in ordered if one.of_module]
    if modules:
        lines += ["", "[modules]"]
        lines += [f"{_string(one.name)} = {_string(one.value)}  {_reason(one)}" for one in modules]
    return "\n".join(lines) + "\n"


def _reason(proposal: Proposal) -> str:
    return _comment(f"{proposal.kind}: {proposal.reason}")


def _comment(text: str) -> str:
    # Control characters are no part of a TOML file.
    return "# " + "".join(letter if letter.isprintable() else " " for letter in text) if text else "#"


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def summary_of(survey: Survey, search: Search, metric: str) -> list[str]:
    """Return the result in lines: figures, whether half precision pays, and the changes that were not taken."""
    lines = [
        f"{survey.dtype} on {survey.device_type}, torch {survey.torch}, seeds {', '.join(map(str, search.seeds))}; "
        f"surveyed over {survey.steps} steps"
    ]
    lines += [*figures_of(search, metric), _verdict(search)]
    if search.chosen and search.best is None:
        lines.append("these entries come from the survey: no run has confirmed them")
    if survey.untimed:
        lines.append(f"there was no time to measure {survey.untimed} uses of ops; their rules are unchanged")
    if search.stopped is not None:
        lines.append(f"stopped early: {search.stopped}")
    lines += [f"tried and rejected: {one.name} = {one.value}: {why}" for one, why in search.rejected]
    lines += [
        f"not tried: {one.name} = {one.value}: {one.kind}: {one.reason}"
        for one in search.untried
        if one not in search.chosen
    ]
    return lines


def figures_of(search: ProgramSearch, metric: str) -> list[str]:
    """Return a line for each list that was run: the metric of each run and the time of a step, or why it failed."""
    lines, best = [], search.best if search.chosen else None
    for name, trial in (("fp32", search.fp32), ("the lists as they are", search.listed), ("this list", best)):
        if trial is not None:
            values = ", ".join(f"{value:.6g}" for value in trial.metrics)
            seconds = "" if trial.seconds is None else f", {1e3 * trial.seconds:.4g} ms a step"
            lines.append(f"{name}: " + (f"failed: {trial.failed}" if trial.failed else f"{metric} {values}{seconds}"))
    return lines


def _verdict(search: Search) -> str:
    """Whether half precision pays on this device, as far as runs tell."""
    fp32, best = search.fp32, search.best
    if fp32 is not None and search.listed is not None and best is None:
        return "no list that was tried keeps the metric within tolerance"
    if fp32 is None or best is None or fp32.seconds is None or best.seconds is None:
        return "whether half precision pays on this device is unknown: there were too few runs or steps"
    ratio = best.seconds / fp32.seconds
    pays = "pays" if ratio <= 1 - NOISE else "does not pay"
    return f"half precision {pays} on this device: a step takes {ratio:.2f} times as long as in fp32"
