"""The report of a run as plain values: a verdict, what to change in the lists, and all that was seen."""

from __future__ import annotations

import gc
import math
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoamp.diagnostics.exponents import FORMATS
from autoamp.diagnostics.report.recording import Recording
from autoamp.diagnostics.report.remedies import contradicts, remedies
from autoamp.diagnostics.report.sampling import CallTime, Samples
from autoamp.diagnostics.report.step_check import Entry, cause_of
from autoamp.diagnostics.tables import counted
from autoamp.diagnostics.verdicts import HalfPrecisionOp, Overflow
from autoamp.errors import UsageError

__all__ = ["FAULTS", "KIND", "SCHEMA", "failures", "plain", "report_of"]

SCHEMA, KIND = 2, "autoamp.run"

FAULTS = {
    "half_precision_op": "half-precision op",
    "not_finite_in_fp32": "not finite in fp32 either",
    "communication": "communication",
}
"""The kinds of an `Overflow` that are no part of the scale search, and how they are called."""

_NAMES = {"scale_search": "scale search", **FAULTS, "not_located": "not located", "unexplained": "unexplained"}
# Operators as a dispatch mode sees them, and the names under which lists have them.
_LISTED_AS = {
    "addmm": ("linear", "addmm"), "mm": ("matmul", "mm"), "bmm": ("matmul", "bmm"), "baddbmm": ("baddbmm",),
    "convolution": ("conv1d", "conv2d", "conv3d"), "_softmax": ("softmax",), "_log_softmax": ("log_softmax",),
    "native_layer_norm": ("layer_norm",), "native_group_norm": ("group_norm",),
}  # fmt: skip


def report_of(handle: Any, **more: Any) -> dict[str, Any]:
    """Return what is known of a handle's run, as plain JSON values.

    Args:
        handle: An `autoamp.Handle`; what it recorded since ``handle.record()`` is in the report.
        more: Entries that are added.

    Returns:
        ``schema``, ``kind``, ``verdict``, ``faults``, ``nonfinite_steps``, ``remedies``, ``timeline``, ``skips``,
        ``samples``, ``trace``, ``values``, ``modules``, ``lists``, ``coverage``, ``versions``, and what was given.
    """
    recording: Recording | None = handle.recording
    samples = Samples() if recording is None else recording.samples
    steps = handle.stats["steps"] if recording is None else recording.steps
    settings = handle.settings
    skips, faults = _skips(handle, recording), _faults(recording)
    trace = _trace(samples, [*faults, *skips["groups"]])
    document = {
        "schema": SCHEMA,
        "kind": KIND,
        "dtype": _short(settings.dtype),
        "device_type": settings.device_type,
        "verdict": _verdict(handle, 0 if recording is None else recording.compared, steps, skips, faults),
        "faults": faults,
        "nonfinite_steps": _nonfinite(handle),
        "remedies": remedies([*faults, *skips["groups"]], trace["hints"], settings.table),
        "timeline": _timeline(handle, recording, steps),
        "skips": skips,
        "samples": _samples(recording),
        "trace": trace,
        "values": _values(samples, handle.loss_scale),
        "modules": _modules(samples),
        "lists": _lists(handle),
        "coverage": _coverage(handle, recording, samples),
        "versions": {
            "autoamp": str(getattr(sys.modules["autoamp"], "__version__", "")),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **more,
    }
    checked: dict[str, Any] = plain(document)
    return checked


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
        f"{group['count']} of kind {_NAMES[group['kind']]}: {group['sentence']}"
        for group in document["skips"]["groups"]
        if what == "skip" or group["kind"] in FAULTS
    ]


def _cure(entry: Mapping[str, Any] | None) -> str:
    """Return what to do about an overflow of which entries were tried."""
    if entry is None:
        return _NO_ENTRY
    return f"with {entry['text']} in the list file the step gives the values of fp32"


_NO_ENTRY = (
    "no list entry was found that cures it and keeps ops in half precision: run in bf16, or make the values smaller"
)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _skips(handle: Any, recording: Recording | None) -> dict[str, Any]:
    """Return the skips one by one and in groups of one cause; of a group the first is shown."""
    found = [] if recording is None else recording.skips
    if recording is None:
        found = [(one.iteration, one.loss_scale, one) for one in handle.overflows.all]
    events: list[dict[str, Any]] = []
    groups: dict[Any, dict[str, Any]] = {}
    for step, scale, overflow in found:
        kind = "unexplained" if overflow is None else overflow.kind
        events.append({"step": step, "scale": scale, "kind": kind})
        cause = None if overflow is None else cause_of(overflow)
        if kind == "scale_search":
            cause = None
        group = groups.setdefault(
            (kind, cause),
            {
                "kind": kind,
                "name": _NAMES[kind],
                "count": 0,
                "first": step,
                "sentence": _sentence(overflow, recording),
                "entry": None if recording is None or overflow is None else _entry(recording.entries.get(cause)),
                "overflow": None if overflow is None else overflow.to_dict(),
            },
        )
        group["count"] += 1
        group["last"] = step
    total = handle.stats["skipped"] if recording is None else len(found)
    return {"total": total, "events": events, "groups": sorted(groups.values(), key=lambda group: -group["count"])}


def _sentence(overflow: Overflow | None, recording: Recording | None) -> str:
    """Return what is said of a skip, with an entry that was tried in the place of one that was not."""
    if overflow is None:
        return "the step was skipped; trace_overflow was off"
    cause = cause_of(overflow)
    if recording is None or overflow.kind != HalfPrecisionOp.kind or cause not in recording.entries:
        return str(overflow)
    return f"{replace(overflow, suggestion=None)}; {_cure(_entry(recording.entries[cause]))}"


def _entry(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {"names": list(entry.names), "of_module": entry.of_module, "text": str(entry)}


def _nonfinite(handle: Any) -> dict[str, Any]:
    """Return the steps without a loss scale whose gradients held inf or nan."""
    steps = [
        {
            "step": one.step, "optimizer": one.optimizer, "parameters": list(one.parameters), "skipped": one.skipped,
            "sentence": str(one), "overflow": None if one.overflow is None else one.overflow.to_dict(),
        }
        for one in handle.nonfinite.found
    ]  # fmt: skip
    return {"total": handle.nonfinite.total, "steps": steps}


def _faults(recording: Recording | None) -> list[dict[str, Any]]:
    """Return what half precision spoiled in steps that were taken."""
    return [
        {
            "step": fault.step, "sentence": fault.sentence, "zero_gradients": list(fault.zero),
            "overflow": fault.overflow.to_dict(), "entry": _entry(fault.entry), "remedy": _cure(_entry(fault.entry)),
        }
        for fault in ([] if recording is None else recording.faults)
    ]  # fmt: skip


def _verdict(
    handle: Any, compared: int, steps: int, skips: Mapping[str, Any], faults: Sequence[Mapping[str, Any]]
) -> dict[str, str]:  # fmt: skip
    """Return a sentence, and whether it is ``"good"``, ``"unclear"`` or ``"bad"``."""
    counts: dict[str, int] = {}
    for group in skips["groups"]:
        counts[group["kind"]] = counts.get(group["kind"], 0) + group["count"]
    if not steps:
        return {"sentence": "no step of an optimizer was seen", "level": "unclear"}
    sentence = f"{skips['total']} of {steps} steps skipped"
    if len(counts) == 1 and skips["total"] > 1:
        sentence += f", all {_NAMES[next(iter(counts))]}"
    elif counts:
        sentence += ": " + ", ".join(f"{count} {_NAMES[kind]}" for kind, count in counts.items())
    forward = [
        group["overflow"] for group in skips["groups"]
        if group["kind"] in FAULTS and group["overflow"]["phase"] == "forward"
    ]  # fmt: skip
    if faults:
        sentence = f"{faults[0]['sentence']}; {sentence}"
    elif not handle.overflows.always:
        sentence += "; overflows were not traced"
    elif forward:
        first = forward[0]
        place = "".join((
            f" in {first['op']}" if first["op"] else "", f" at {first['location']}" if first["location"] else "",
        ))  # fmt: skip
        sentence += f"; forward overflow{place}"
    elif unchecked := _unchecked(handle, compared):
        sentence += f"; {unchecked}"
    else:
        sentence += "; no forward overflow"
    if not handle.optimizers.loss_scalers.has_dynamic:
        sentence += "; the loss scale is fixed"
    bad = bool(faults) or any(kind in FAULTS for kind in counts)
    unclear = (
        counts.get("not_located", 0) + counts.get("unexplained", 0) > 0 or _unchecked(handle, compared) is not None
    )
    return {"sentence": sentence, "level": "bad" if bad else "unclear" if unclear else "good"}


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


def _timeline(handle: Any, recording: Recording | None, steps: int) -> dict[str, Any]:
    points = [(steps, handle.loss_scale)] if recording is None else recording.scales
    return {"steps": steps, "scales": [list(point) for point in points]}


def _samples(recording: Recording | None) -> dict[str, Any]:
    """Return which steps were looked at closely or compared with fp32, and how long that took."""
    found: dict[str, Any] = {
        "recorded": False, "steps": [], "seconds": 0.0, "sampled_seconds": 0.0, "left_out": 0, "compared": 0,
        "compared_seconds": 0.0, "trouble": None,
    }  # fmt: skip
    if recording is not None:
        steps = [sample._asdict() for sample in recording.samples.steps]
        own = ("seconds", "sampled_seconds", "left_out", "compared", "compared_seconds", "trouble")
        found |= {"recorded": True, "steps": steps, **{name: getattr(recording, name) for name in own}}
    return found


def _trace(samples: Samples, overflows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rows of the trace, and its hints but for those that would contradict the remedy of an overflow."""
    rows = []
    for key, row in (*samples.rows.items(), *samples.unlisted.items()):
        timed = samples.times.get(key, CallTime())
        times = {"timed_calls": timed.calls, "cpu_us": timed.cpu_us if timed.calls else None}
        rows.append({**row.to_dict(), "root": row.site.root, **times, "device_us": timed.device_us})
    return {
        "steps": [sample.step for sample in samples.steps if sample.kind == "casts"],
        "rows": rows,
        "hints": [
            hint.to_dict()
            for hint in sorted(samples.hints.values(), key=lambda hint: -hint.bytes)
            if not contradicts(hint, overflows, rows)
        ],
    }


def _values(samples: Samples, loss_scale: float) -> dict[str, Any]:
    """Return histograms by place and parameter; gradients without the loss scale."""
    return {
        "steps": [sample.step for sample in samples.steps if sample.kind == "values"],
        "loss_scale": loss_scale,
        "formats": {dtype: list(limits) for dtype, limits in FORMATS.items()},
        "ops": [
            {
                "op": op.op, "within": op.within, "module": op.site.module, "location": op.site.location,
                "calls": op.calls, **op.values.to_dict(),
            }
            for op in samples.ops.values()
        ],
        "gradients": [{"parameter": name, **found.to_dict()} for name, found in samples.gradients.items()],
    }  # fmt: skip


def _modules(samples: Samples) -> list[dict[str, Any]]:
    """Return the modules by path, with the dtypes that listed ops gave back in each, itself alone."""
    found = {
        key: {"root": key[0], "path": key[1], **about, "dtypes_out": {}, "calls": 0, "casts": 0}
        for key, about in samples.modules.items()
    }
    for row in samples.rows.values():
        at = found.get((row.site.root or "", row.site.module or ""))
        if at is None:
            continue
        at["calls"] += row.calls
        at["casts"] += row.casts
        for dtype, count in row.dtypes_out.items():
            at["dtypes_out"][dtype] = at["dtypes_out"].get(dtype, 0) + count
    return list(found.values())


def _lists(handle: Any) -> dict[str, Any]:
    table = handle.settings.table
    return {
        "sources": list(table.sources),
        "rules": [
            {
                "target": rule.target, "policy": rule.policy.value, "origin": str(rule.origin),
                "shipped": rule.origin.shipped, "note": rule.remedy or rule.reason,
            }
            for rule in table.rules
        ],
        "modules": [
            {
                "target": rule.pattern, "policy": f"module {rule.precision.value}", "origin": str(rule.origin),
                "shipped": rule.origin.shipped, "note": "",
            }
            for rule in table.modules
        ],
    }  # fmt: skip


def _coverage(handle: Any, recording: Recording | None, samples: Samples) -> list[dict[str, Any]]:
    """Return what the report does not show, or shows less of, each with a count and what may be done."""
    found: list[dict[str, Any]] = []

    def add(what: str, count: int, detail: str, remedy: str) -> None:
        if count:
            found.append({"what": what, "count": count, "detail": detail, "remedy": remedy})

    if recording is None:
        add("nothing recorded", 1, "casts, values and the scale's way are missing", "call handle.record() first")
        return found
    cut = [sample.step for sample in recording.samples.steps if not sample.whole]
    add("samples not to the end of the step", len(cut), "steps " + ", ".join(map(str, cut)) + ": a sample ends after "
        "so many calls, bytes or seconds", "none needed")  # fmt: skip
    add("steps not compared with fp32", int(recording.unchecked is not None), f"{recording.unchecked}: an op that "
        "overflows without a skipped step is not found there", "none needed")  # fmt: skip
    add("samples left out", recording.left_out, "those before had taken the time for them", "none needed")
    add("trouble", int(recording.trouble is not None), recording.trouble or "", "run with fewer other tools")
    add("compiled graphs", recording.graphs, "torch.compile made these; casts within them were compiled in and are "
        "not shown, and overflows in them are not located", "run once without torch.compile")  # fmt: skip
    add("scripted modules", sum(bool(about["scripted"]) for about in samples.modules.values()),
        "what torch.jit runs is not seen", "run once without torch.jit.script")  # fmt: skip
    add("CUDA graphs", _cuda_graphs(), "a replay calls no function: casts were counted once, during the capture",
        "run once without graphs")  # fmt: skip
    for (why, op, place), count in (recording.onlooker.uncast).most_common(200):
        add(f"calls {why}", count, f"{op} at {place}", "nothing is cast there, because the program asks for that")
    for (op, place), count in _past_the_lists(samples, handle.settings.table).items():
        add("unpatched references", count, f"{op} at {place} bypassed its replacement: another function of "
            "torch called it, or a name that was bound before", "call autoamp.init() before other imports, and "
            "look the function up where it is called")  # fmt: skip
    add("names rebound", len(handle.late_bound), "taken from torch before and found: " + ", ".join(
        handle.late_bound[:20]), "none needed")  # fmt: skip
    skipped = [rule.target for rule in handle.skipped_rules]
    add("rules without an op", len(skipped), "this torch lacks " + ", ".join(skipped[:20]), "none needed")
    return found


def _past_the_lists(samples: Samples, table: Any) -> dict[tuple[str, str], int]:
    listed = {rule.target for rule in table.rules if rule.bare and rule.policy.value in ("fp16", "fp32", "banned")}
    found: dict[tuple[str, str], int] = {}
    for op in samples.ops.values():
        name = op.op.removeprefix("aten::")
        if op.within is None and listed.intersection(_LISTED_AS.get(name, (name,))):
            key = op.op, op.site.location or "-"
            found[key] = found.get(key, 0) + op.calls
    return found


def _cuda_graphs() -> int:
    if not torch.cuda.is_initialized():
        return 0
    objects: Iterable[Any] = gc.get_objects()
    return sum(type(one) is torch.cuda.CUDAGraph for one in objects)
