"""The report of a run as plain values: a verdict, what to change in the lists, and all that was seen."""

from __future__ import annotations

import math
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoamp.diagnostics.exponents import FORMATS
from autoamp.diagnostics.report.recording import Recording
from autoamp.diagnostics.report.remedies import contradicts, remedies
from autoamp.diagnostics.report.sampling import Samples
from autoamp.diagnostics.report.step_check import Fault
from autoamp.diagnostics.tables import counted
from autoamp.errors import UsageError
from autoamp.tensors import dtype_name

__all__ = ["FAULTS", "KIND", "SCHEMA", "failures", "plain", "report_of"]

SCHEMA, KIND = 3, "autoamp.run"

FAULTS = {
    "half_precision_op": "half-precision op",
    "not_finite_in_fp32": "not finite in fp32 either",
    "communication": "communication",
}
"""The kinds of an `Overflow` that are no part of the scale search, and how they are called."""

_NAMES = {"scale_search": "scale search", **FAULTS, "not_located": "not located", "unexplained": "unexplained"}


def report_of(handle: Any, **more: Any) -> dict[str, Any]:
    """Return what is known of a handle's run, as plain JSON values.

    Args:
        handle: An `autoamp.Handle`; what it recorded since ``handle.record()`` is in the report.
        more: Entries that are added.

    Returns:
        ``schema``, ``kind``, ``verdict``, ``faults``, ``nonfinite_steps``, ``remedies``, ``timeline``, ``skips``,
        ``samples``, ``trace``, ``values``, ``lists``, ``coverage``, ``versions``, and what was given.
    """
    recording = handle.recording or _unrecorded(handle)
    samples, settings = recording.samples, handle.settings
    skips, faults = _skips(recording), [_fault(fault) for fault in recording.check.faults]
    trace = _trace(samples, [*faults, *skips["groups"]])
    document = {
        "schema": SCHEMA,
        "kind": KIND,
        "dtype": dtype_name(settings.dtype),
        "device_type": settings.device_type,
        "verdict": _verdict(handle, recording, skips, faults),
        "faults": faults,
        "nonfinite_steps": _nonfinite(handle),
        "remedies": remedies([*faults, *skips["groups"]], trace["hints"], settings.table),
        "timeline": {"steps": recording.steps, "scales": recording.scales},
        "skips": skips,
        "samples": _samples(handle, recording),
        "trace": trace,
        "values": _values(samples, handle.loss_scale),
        "lists": _lists(settings.table),
        "coverage": _coverage(handle, recording),
        "versions": {
            "autoamp": str(getattr(sys.modules["autoamp"], "__version__", "")),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **more,
    }
    checked: dict[str, Any] = plain(document)
    return checked


def _unrecorded(handle: Any) -> Recording:
    """Return a recording that never began, with what a handle knows without one."""
    found = Recording(handle)
    found.steps = handle.stats["steps"]
    found.scales = [(found.steps, handle.loss_scale)]
    explained = [(one.iteration, one.loss_scale, one) for one in handle.overflows.all]
    found.skips = [*explained, *[(None, None, None)] * (handle.stats["skipped"] - len(explained))]
    return found


def plain(value: Any) -> Any:
    """Return a copy that JSON takes: inf and nan as texts, tuples as lists, keys as texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def failures(document: Mapping[str, Any], what: str) -> list[str]:
    """Return why a run is to count as failed, a sentence for each reason; none where it is not.

    Args:
        document: What `report_of` returned.
        what: ``"overflow"``: skips that are no part of the scale search, and were located. ``"skip"``: all skips. Both:
            overflows in steps that were taken, and gradients with inf or nan in steps that no loss scale guards.

    Raises:
        UsageError: ``what`` is neither.
    """
    if what not in ("overflow", "skip"):
        raise UsageError(f"--fail-on {what!r} is unknown; choose 'overflow' or 'skip'")
    taken = [f"step {fault['step']}: {fault['sentence']}; {fault['remedy']}" for fault in document["faults"]]
    bad = document.get("nonfinite_steps")
    if bad and bad["total"]:
        taken.append(f"{counted(bad['total'], 'step')} with inf or nan: {bad['steps'][0]['sentence']}")
    return taken + [
        "; ".join(filter(None, (f"{group['count']} of kind {group['name']}: {group['sentence']}", group["remedy"])))
        for group in document["skips"]["groups"]
        if what == "skip" or group["kind"] in FAULTS
    ]


def _fault(fault: Fault) -> dict[str, Any]:
    """Return what half precision spoiled in a step that was taken."""
    return {
        "step": fault.step, "sentence": fault.sentence, "zero_gradients": fault.zero,
        "overflow": fault.overflow.to_dict(),
        "remedy": fault.overflow.suggestion or "run in bf16, or make the values smaller",
    }  # fmt: skip


def _skips(recording: Recording) -> dict[str, Any]:
    """Return the skips one by one and in groups of one cause; of a group the first is shown."""
    events = []
    groups: dict[Any, dict[str, Any]] = {}
    for step, scale, overflow in recording.skips:
        kind = "unexplained" if overflow is None else overflow.kind
        events += [] if step is None else [{"step": step, "scale": scale, "kind": kind}]
        cause = None if overflow is None or kind == "scale_search" else overflow.place
        group = groups.setdefault(
            (kind, cause),
            {
                "kind": kind, "name": _NAMES[kind], "count": 0, "first": step,
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


def _nonfinite(handle: Any) -> dict[str, Any]:
    """Return the steps without a loss scale whose gradients held inf or nan."""
    steps = [
        {
            "step": one.step, "optimizer": one.optimizer, "parameters": one.parameters, "skipped": one.skipped,
            "sentence": str(one), "overflow": None if one.overflow is None else one.overflow.to_dict(),
        }
        for one in handle.nonfinite.found
    ]  # fmt: skip
    return {"total": handle.nonfinite.total, "steps": steps}


def _verdict(
    handle: Any, recording: Recording, skips: Mapping[str, Any], faults: Sequence[Mapping[str, Any]]
) -> dict[str, str]:  # fmt: skip
    """Return a sentence, and whether it is ``"good"``, ``"unclear"`` or ``"bad"``."""
    if not recording.steps:
        return {"sentence": "no step of an optimizer was seen", "level": "unclear"}
    counts: Counter[str] = Counter()
    for group in skips["groups"]:
        counts[group["kind"]] += group["count"]
    sentence = f"{skips['total']} of {recording.steps} steps skipped"
    if len(counts) == 1 and skips["total"] > 1:
        sentence += f", all {_NAMES[next(iter(counts))]}"
    elif counts:
        sentence += ": " + ", ".join(f"{count} {_NAMES[kind]}" for kind, count in counts.items())
    located = [group["overflow"] for group in skips["groups"] if group["kind"] in FAULTS]
    forward = next((one for one in located if one["phase"] == "forward"), None)
    unchecked = _unchecked(handle, recording.check.compared)
    if faults:
        sentence = f"{faults[0]['sentence']}; {sentence}"
    elif not handle.overflows.always:
        sentence += "; overflows were not traced"
    elif forward is not None:
        sentence += "; forward overflow" + (f" in {forward['op']}" if forward["op"] else "")
        sentence += f" at {forward['location']}" if forward["location"] else ""
    else:
        sentence += f"; {unchecked or 'no forward overflow'}"
    if not handle.optimizers.loss_scalers.has_dynamic:
        sentence += "; the loss scale is fixed"
    unclear = unchecked is not None or counts["not_located"] or counts["unexplained"]
    return {"sentence": sentence, "level": "bad" if faults or located else "unclear" if unclear else "good"}


def _unchecked(handle: Any, compared: int) -> str | None:
    """Return why no gradient was looked through for overflows, None where some were.

    Args:
        handle: The handle.
        compared: How many steps were compared with fp32.
    """
    optimizers = handle.optimizers
    looked = f"looked for in {counted(compared, 'step')} alone" if compared else "not looked for"
    own = None if optimizers.counts.own is None else optimizers.counts.own.scalers.values()
    if not any(scaler.checks for scaler in (optimizers.scalers if own is None else own)):
        return f"at a loss scale of 1 gradients are not checked, so that overflows were {looked}"
    if own is None and not optimizers.counts.steps:
        return f"no loss was scaled, so that gradients were not checked and overflows {looked}"
    return None


def _samples(handle: Any, recording: Recording) -> dict[str, Any]:
    """Return which steps were looked at closely or compared with fp32, and how long that took."""
    samples, check = recording.samples, recording.check
    return {
        "recorded": handle.recording is not None, "steps": [sample._asdict() for sample in samples.steps],
        "seconds": recording.seconds, "sampled_seconds": sum(sample.seconds for sample in samples.steps),
        "left_out": samples.left_out + check.left_out, "compared": check.compared,
        "compared_seconds": check.seconds, "trouble": samples.trouble,
    }  # fmt: skip


def _of_kind(samples: Samples, kind: str) -> list[int]:
    return [sample.step for sample in samples.steps if sample.kind == kind]


def _trace(samples: Samples, overflows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rows of the trace, and its hints but for those that would contradict the remedy of an overflow."""
    rows = [{**row.to_dict(), "root": row.site.root} for row in (*samples.trace.rows, *samples.trace.unlisted)]
    hints = [hint.to_dict() for hint in samples.trace.hints if not contradicts(hint, overflows)]
    return {"steps": _of_kind(samples, "casts"), "rows": rows, "hints": hints}


def _values(samples: Samples, loss_scale: float) -> dict[str, Any]:
    """Return histograms by place and parameter; gradients without the loss scale."""
    return {
        "steps": _of_kind(samples, "values"),
        "loss_scale": loss_scale,
        "formats": FORMATS,
        "ops": [
            {
                "op": op.op, "within": op.within, "module": op.site.module, "location": op.site.location,
                "calls": op.calls, **op.values.to_dict(),
            }
            for op in samples.values.ops
        ],
        "gradients": [{"parameter": name, **found.to_dict()} for name, found in samples.values.gradients.items()],
    }  # fmt: skip


def _lists(table: Any) -> dict[str, Any]:
    rules = [(rule.target, rule.policy.value, rule.origin, rule.remedy or rule.reason) for rule in table.rules]
    modules = [(rule.pattern, f"module {rule.precision.value}", rule.origin, "") for rule in table.modules]
    named: list[list[dict[str, Any]]] = [
        [
            {"target": target, "policy": policy, "origin": str(origin), "shipped": origin.shipped, "note": note}
            for target, policy, origin, note in several
        ]
        for several in (rules, modules)
    ]
    return {"sources": table.sources, "rules": named[0], "modules": named[1]}


def _coverage(handle: Any, recording: Recording) -> list[dict[str, Any]]:
    """Return what the report does not show, or shows less of, each with a count and what may be done."""
    none, samples, check = "none needed", recording.samples, recording.check
    if handle.recording is None:
        lines = [("nothing recorded", 1, "casts, values and the scale's way are missing", "call handle.record() first")]
        return [dict(zip(("what", "count", "detail", "remedy"), line, strict=True)) for line in lines]
    cut = [str(sample.step) for sample in samples.steps if not sample.whole]
    skipped = [rule.target for rule in handle.patched.skipped_rules]
    lines = [
        ("samples not to the end of the step", len(cut),
         f"steps {', '.join(cut)}: a sample ends after so many calls, bytes or seconds", none),
        ("steps not compared with fp32", int(check.unchecked is not None),
         f"{check.unchecked}: an op that overflows without a skipped step is not found there", none),
        ("samples left out", samples.left_out + check.left_out, "those before had taken the time for them", none),
        ("trouble", int(samples.trouble is not None), samples.trouble or "", "run with fewer other tools"),
        ("compiled graphs", recording.graphs, "torch.compile made these; casts within them were compiled in and are "
         "not shown, and overflows in them are not located", "run once without torch.compile"),
        *((f"calls {why}", count, f"{op} at {place}", "nothing is cast there, because the program asks for that")
          for (why, op, place), count in samples.uncast.most_common(200)),
        ("names rebound", len(handle.patched.late_bound),
         f"taken from torch before and found: {', '.join(handle.patched.late_bound[:20])}", none),
        ("rules without an op", len(skipped), f"this torch lacks {', '.join(skipped[:20])}", none),
    ]  # fmt: skip
    return [dict(zip(("what", "count", "detail", "remedy"), line, strict=True)) for line in lines if line[1]]
