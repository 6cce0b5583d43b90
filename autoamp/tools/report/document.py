"""The report of a run as plain values: a verdict, entries for the lists, and everything that was recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoamp.core import CastTable, Guards, NonFiniteSteps, versions
from autoamp.errors import UsageError
from autoamp.tensors import dtype_name
from autoamp.tools.ranges import FORMATS
from autoamp.tools.report.recording import ReportRecording
from autoamp.tools.step_check import StepCheck
from autoamp.tools.tables import counted
from autoamp.torch_private import compiled_graphs

SCHEMA, KIND = 4, "autoamp.run"

# The kinds of an `Overflow` as people read them, and in a sentence: so many steps were skipped by this.
_KINDS = {
    "scale_search": ("scale search", "by the search for the loss scale"),
    "scale_too_high": ("loss scale too high", "by a loss scale that is too high and goes no lower"),
    "half_precision_op": ("half-precision op", "by an op in half precision"),
    "not_finite_in_fp32": ("not finite in fp32 either", "by values that are not finite in fp32 either"),
    "communication": ("communication", "by the communication of gradients"),
    "not_located": ("not located", "by a cause that was not located"),
    "unexplained": ("unexplained", "by a cause that was not looked for"),
}
# Those that the search for the loss scale does not explain, and whose cause was found.
_FAULTS = ("half_precision_op", "not_finite_in_fp32", "communication")


def report_of(recording: ReportRecording | None, nonfinite: NonFiniteSteps, table: CastTable) -> dict[str, Any]:
    """Return the recording of a run as plain JSON values.

    Args:
        recording: The recording; None if nothing was recorded.
        nonfinite: Found steps without a loss scale whose loss or gradients held inf or nan.
        table: The rules of the run.

    Returns:
        ``schema``, ``kind``, ``dtype``, ``device_type``, ``verdict``, ``faults``, ``roundings``, ``nonfinite_steps``,
        ``inferences``, ``half_losses``, ``remedies``, ``timeline``, ``skips``, ``samples``, ``trace``, ``values``,
        ``lists``, ``coverage`` and ``versions``.

    Raises:
        UsageError: Nothing was recorded.
    """
    if recording is None:
        raise UsageError("report() needs a recording; call handle.record() before training")
    samples, check, casts = recording.samples, recording.check, recording.optimizers.casts
    skips, inferences = _skips(recording), _inferences(recording)
    faults = [
        {"step": one.iteration, "sentence": sentence, "overflow": one.to_dict(), "remedy": one.suggestion}
        for sentence, one in check.faults
    ]
    sources = [] if check.source is None else [check.source.to_dict()]
    roundings = [{"step": step, **rounding.to_dict()} for step, rounding in check.roundings]
    trace = samples.trace.to_dict()
    document: dict[str, Any] = plain({
        "schema": SCHEMA,
        "kind": KIND,
        "dtype": dtype_name(casts.dtype),
        "device_type": casts.device_type,
        "verdict": _verdict(recording, inferences, skips, [*faults, *roundings]),
        "faults": faults,
        "roundings": roundings,
        "nonfinite_steps": {"total": nonfinite.total, "sentences": nonfinite.sentences},
        "inferences": inferences,
        "half_losses": recording.losses,
        "remedies": remedies([*faults, *roundings, *sources, *skips["groups"], *inferences["causes"]], table),
        "timeline": {"steps": recording.steps, "scales": recording.scales},
        "skips": skips,
        "samples": {"steps": samples.steps, "compared": check.compared},
        "trace": {"rows": trace["rows"] + trace["unlisted"]},
        "values": {
            "loss_scale": recording.optimizers.scalers[0].loss_scale, "formats": FORMATS, **samples.values.tables(),
        },
        "lists": table.sources,
        "coverage": _coverage(recording),
        "versions": versions(),
    })  # fmt: skip
    return document


def plain(value: Any) -> Any:
    """Return a copy that JSON takes: inf and nan as texts, tuples as lists, keys as texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def failures(document: Mapping[str, Any], what: str) -> list[str]:
    """Return why a run counts as failed, a sentence for each reason; none if it does not.

    Args:
        document: The result of `report_of`.
        what: ``"overflow"``: skips that the search for the loss scale does not explain, located or not. ``"skip"``: all
            skips. Both: overflows in steps that were not skipped, and inf or nan in the loss or the gradients of steps
            that no loss scale guards.

    Raises:
        UsageError: ``what`` is neither.
    """
    if what not in ("overflow", "skip"):
        raise UsageError(f"--fail-on {what!r} is unknown; choose 'overflow' or 'skip'")
    found = [f"step {fault['step']}: {fault['sentence']}; {fault['remedy']}" for fault in document["faults"]]
    nonfinite = document["nonfinite_steps"]
    if nonfinite["total"]:
        found.append(f"{counted(nonfinite['total'], 'step')} with inf or nan: {nonfinite['sentences'][0]}")
    inferences = document.get("inferences", {"nonfinite": 0})
    found += [inferences["sentence"]] if inferences["nonfinite"] else []
    for group in document["skips"]["groups"]:
        if what == "skip" or group.get("fails", group["kind"] in _FAULTS):
            remedy = f"; {group['remedy']}" if group["remedy"] else ""
            found.append(f"{group['count']} of kind {group['name']}: {group['sentence']}{remedy}")
    return found


def _inferences(recording: ReportRecording) -> dict[str, Any]:
    """Return how many calls of models with gradients off were looked at, and what made inf or nan in them."""
    looked = recording.overflows.recorder.inferences
    if looked is None:
        return {"calls": 0, "nonfinite": 0, "sentence": None, "causes": []}
    causes = [{"sentence": one.cause, "overflow": one.to_dict()} for one in looked.found]
    return {"calls": looked.calls, "nonfinite": looked.nonfinite, "sentence": looked.sentence, "causes": causes}


def remedies(overflows: Iterable[Mapping[str, Any]], table: CastTable) -> list[dict[str, Any]]:
    """Return entries for a list file: ``policy``, ``op``, ``evidence``, and ``now``, the rule in force.

    The policy is ``"fp32"``, or ``"modules"`` where ``op`` is a class of modules that is to run in fp32.

    Args:
        overflows: The faults and roundings of a report, and its groups of skips.
        table: The rules in force.
    """
    found: dict[str, dict[str, Any]] = {}
    for one in overflows:
        finding = one.get("overflow", one)
        if finding is None:
            continue
        times = f"{counted(one['count'], 'skip')}; first: " if "count" in one else ""
        evidence = " ".join(f"{times}{one['sentence']}".split())
        if (module := finding["fp32_module"]) is not None:
            now = "as the rest of the list says"
            found.setdefault(module, {"policy": "modules", "op": module, "evidence": evidence, "now": now})
        for op in finding["fp32_names"]:
            rule = table.policy_of(op)
            now = "on no list" if rule is None else f"under the policy {rule.policy.value} in {rule.origin}"
            found.setdefault(op, {"policy": "fp32", "op": op, "evidence": evidence, "now": now})
    return list(found.values())


def _skips(recording: ReportRecording) -> dict[str, Any]:
    """Return the skips one by one, and in groups by cause. A group shows its first skip."""
    events = []
    groups: dict[Any, dict[str, Any]] = {}
    for step, scale, overflow in recording.skips:
        kind = "unexplained" if overflow is None else overflow.kind
        events.append({"step": step, "scale": scale, "kind": kind})
        cause = None if overflow is None or kind == "scale_search" else overflow.place
        group = groups.setdefault(
            (kind, cause, fails := overflow is not None and overflow.is_failure),
            {
                "kind": kind, "name": _KINDS[kind][0], "count": 0, "first": step, "fails": fails,
                "sentence": "the step was skipped; trace_overflow was off" if overflow is None
                else str(replace(overflow, suggestion=None)),
                "remedy": None if overflow is None else overflow.suggestion,
                "overflow": None if overflow is None else overflow.to_dict(),
            },
        )  # fmt: skip
        group["count"] += 1
        group["last"] = step
    by_count = sorted(groups.values(), key=lambda group: -group["count"])
    return {"total": len(recording.skips), "events": events, "groups": by_count}


def _verdict(
    recording: ReportRecording,
    inferences: Mapping[str, Any],
    skips: Mapping[str, Any],
    faults: Sequence[Mapping[str, Any]],
) -> dict[str, str]:
    """Return a sentence, and whether it is ``"good"``, ``"unclear"`` or ``"bad"``."""
    if not recording.steps:
        sentence = "no step of an optimizer was seen"
        if inferences["calls"]:
            calls = f"{counted(inferences['calls'], 'call')} of models with gradients off"
            sentence = inferences["sentence"] or f"{calls}, whose outputs were all finite; {sentence}"
        return {"sentence": sentence, "level": "bad" if inferences["nonfinite"] else "unclear"}
    counts = Counter(event["kind"] for event in skips["events"])
    sentence = f"{skips['total']} of {recording.steps} steps skipped"
    if len(counts) == 1 and skips["total"] > 1:
        sentence += f", all {_KINDS[next(iter(counts))][1]}"
    elif counts:
        sentence += ": " + ", ".join(f"{count} {_KINDS[kind][1]}" for kind, count in counts.items())
    located = [group["overflow"] for group in skips["groups"] if group["kind"] in _FAULTS]
    forward = next((one for one in located if one["phase"] == "forward"), None)
    unchecked = _unchecked(recording.optimizers, recording.check)
    if faults:
        sentence = f"{faults[0]['sentence']}; {sentence}"
    elif not recording.overflows.always:
        sentence += "; overflows were not traced"
    elif forward is not None:
        sentence += "; forward overflow" + (f" in {forward['op']}" if forward["op"] else "")
        sentence += f" at {forward['location']}" if forward["location"] else ""
    else:
        sentence += f"; {unchecked or 'no forward overflow'}"
    if not recording.optimizers.loss_scalers.has_dynamic:
        sentence += "; the loss scale is fixed"
    if losses := recording.losses:
        sentence += f"; {losses[0]['sentence']}"
    if inferences["nonfinite"]:
        sentence = f"{inferences['sentence']}; {sentence}"
    is_bad = bool(inferences["nonfinite"] or faults or losses or any(group["fails"] for group in skips["groups"]))
    if not is_bad and (farthest := recording.check.farthest) is not None:
        sentence += f"; of {counted(recording.check.compared, 'step')} compared with fp32 {farthest}"
        if (source := recording.check.source) is not None:
            sentence += f". {source.share:.0%} of that comes from {source.place}: {source.remedy}"
    unclear = unchecked is not None or counts["not_located"] or counts["unexplained"]
    return {"sentence": sentence, "level": "bad" if is_bad else "unclear" if unclear else "good"}


def _unchecked(optimizers: Guards, check: StepCheck) -> str | None:
    """Return why no gradient, or no step that was taken, was checked for overflows, None where some were.

    Args:
        optimizers: Those of the run.
        check: Has compared steps with fp32.
    """
    looked = f"looked for in {counted(check.compared, 'step')} alone" if check.compared else "not looked for"
    if not any(scaler.checks for scaler in optimizers.steps.own or optimizers.scalers):
        return f"at a loss scale of 1 gradients are not checked, so that overflows were {looked}"
    if not optimizers.steps.guarded and not optimizers.steps.own:
        return f"no loss was scaled, so that gradients were not checked and overflows {looked}"
    if not check.compared and check.unchecked is not None:
        return f"overflows in steps that were taken were not looked for ({check.unchecked})"
    return None


def _coverage(recording: ReportRecording) -> list[str]:
    """Return what the report does not show, a sentence for each."""
    check, found = recording.check, []
    if check.unchecked is not None:
        found.append(
            f"some steps were not compared with fp32 ({check.unchecked}): an op that overflows there without a "
            "skipped step, or rounds, is not found"
        )
    if graphs := compiled_graphs():
        found.append(
            f"torch.compile has made {counted(graphs, 'graph')} in this process: casts in that code are not shown, and "
            "overflows in it are not located; run once without torch.compile"
        )
    return found
