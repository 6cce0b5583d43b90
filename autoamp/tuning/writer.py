"""Writes what a search found as a list file, each entry with its reason as a comment."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from autoamp.errors import UsageError
from autoamp.ops import known_ops
from autoamp.rules import check_bare_names, load_table
from autoamp.tuning.costs import Survey
from autoamp.tuning.model import NOISE, Proposal, speed_of
from autoamp.tuning.search import SearchResult, Trial

__all__ = ["list_text", "summary_of", "write_list"]

_ORDER = ("fp16", "fp32", "none")


def list_text(proposals: Sequence[Proposal], extends: Sequence[str] = (), comments: Sequence[str] = ()) -> str:
    """Return a list file with these entries.

    Args:
        proposals: The entries, each with its reason.
        extends: The sets and files that it is laid over; none is what applies anyway.
        comments: Lines for its head.
    """
    lines = [_comment(line) for line in comments]
    lines += ["schema = 1"]
    if extends:
        lines.append(f"extends = [{', '.join(map(_string, extends))}]")
    for policy in _ORDER:
        entries = sorted((one for one in proposals if one.value == policy and not one.of_module), key=_name)
        if entries:
            lines += ["", f"{policy} = [", *(f"    {_string(one.name)},  {_reason(one)}" for one in entries), "]"]
    modules = sorted((one for one in proposals if one.of_module), key=_name)
    if modules:
        lines += ["", "[modules]"]
        lines += [f"{_string(one.name)} = {_string(one.value)}  {_reason(one)}" for one in modules]
    return "\n".join(lines) + "\n"


def _name(proposal: Proposal) -> str:
    return proposal.name


def _reason(proposal: Proposal) -> str:
    return _comment(f"{proposal.kind}: {proposal.reason}")


def _comment(text: str) -> str:
    # Control characters are no part of a TOML file.
    return "# " + "".join(letter if letter.isprintable() else " " for letter in text) if text else "#"


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def write_list(path: Path, text: str) -> None:
    """Write a list file, once it has been read and checked as one.

    Raises:
        ListFileError: The text is no list file; nothing was written.
        UsageError: The file cannot be written.
    """
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".autoamp.", suffix=".toml")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            check_bare_names(load_table(name, start=path.parent, environ={}), known_ops())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written ({error}); give a file in a directory that exists") from None


def summary_of(survey: Survey, result: SearchResult, seeds: Sequence[int], metric: str) -> list[str]:
    """Return what was found, in lines for people: figures, whether half pays here, what was not tried and not taken."""
    lines = [
        f"{survey.dtype} on {survey.device_type}, torch {survey.torch}, seeds {', '.join(map(str, seeds))}; "
        f"surveyed over {survey.steps} steps"
    ]
    for name, trial in (("fp32", result.fp32), ("the lists as they are", result.listed), ("this list", result.best)):
        if trial is not None and not (name == "this list" and not result.chosen):
            lines.append(f"{name}: {_figures(trial, metric)}")
    lines += _verdict(survey, result)
    if result.chosen and not result.confirmed:
        lines.append("these entries come from the cost model: no run has confirmed them")
    if survey.untimed:
        lines.append(f"there was no time to measure {survey.untimed} uses of ops; their rules are unchanged")
    if result.stopped is not None:
        lines.append(f"stopped early: {result.stopped}")
    lines += [f"tried and rejected: {one.name} = {one.value}: {why}" for one, why in result.rejected]
    lines += [
        f"not tried: {one.name} = {one.value}: {one.kind}: {one.reason}"
        for one in result.untried
        if one not in result.chosen
    ]
    return lines


def _figures(trial: Trial, metric: str) -> str:
    if trial.failed is not None:
        return f"failed: {trial.failed}"
    values = ", ".join(f"{value:.6g}" for value in trial.metrics)
    seconds = "" if trial.seconds is None else f", {1e3 * trial.seconds:.4g} ms a step"
    peak = "" if trial.peak_bytes is None else f", at most {trial.peak_bytes / 2**20:,.0f} MiB"
    return f"{metric} {values}{seconds}{peak}"


def _verdict(survey: Survey, result: SearchResult) -> list[str]:
    """Say whether half precision pays on this device: by runs, or else by the cost model."""
    fp32, best = result.fp32, result.best
    if fp32 is None or result.listed is None:
        return [_predicted(survey)]
    if best is None:
        return ["no list that was tried keeps the metric within tolerance", _predicted(survey)]
    if fp32.seconds is None or best.seconds is None:
        return [_predicted(survey)]
    ratio = best.seconds / fp32.seconds
    if ratio > 1 - NOISE:
        return [f"half precision does not pay on this device: a step takes {ratio:.2f} times as long as in fp32"]
    return [f"half precision pays on this device: a step takes {ratio:.2f} times as long as in fp32"]


def _predicted(survey: Survey) -> str:
    ratio = speed_of(survey)
    if ratio is None:
        return "whether half precision pays on this device is unknown: no op that runs in it was measured"
    pays = "pays" if ratio < 1 - NOISE else "does not pay"
    return (
        f"by the cost model half precision {pays} on this device: what runs in it takes {ratio:.2f} times as long as "
        "in fp32, casts apart"
    )
