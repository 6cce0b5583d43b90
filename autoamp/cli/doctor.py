"""`autoamp doctor`: looks at the device, the lists and the names taken before `init`, and prints what it finds."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from autoamp.cli import probes
from autoamp.cli.measurements import REPEATS, Measured, Spread, measure
from autoamp.cli.output import COLUMNS, aligned, show
from autoamp.errors import ListFileError, UsageError
from autoamp.memory import why_not_kept

__all__ = ["doctor"]


def doctor(chosen: argparse.Namespace) -> int:
    """Look around and print what is found. Returns the exit code: 1 where the lists of this place cannot be used."""
    sys.path[:0] = [] if sys.flags.safe_path or os.getcwd() in sys.path else [os.getcwd()]
    for module in chosen.imports:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise UsageError(f"--import {module}: {type(error).__name__}: {error}") from error
    device = probes.device_of(chosen.device_type)
    found: dict[str, Any] = {
        "packages": probes.packages(),
        "kernels": probes.kernels(),
        "device": device,
        "freed_memory": _freed_memory(device["kind"]),
        **_lists_and_names(device["kind"]),
    }
    measured = [] if chosen.quick else measure(device["kind"])
    found["measured"] = [{**dataclasses.asdict(one), "verdict": one.verdict} for one in measured if one.dtype != "fp32"]
    code = int("error" in found["lists"])
    if chosen.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return code
    for heading, lines in _sections(found, measured):
        show(heading)
        sys.stdout.write("".join(f"  {line}\n" for line in lines) + "\n")
    return code


def _freed_memory(kind: str) -> str:
    """Return what `autoamp run` does about freed memory, in words."""
    why = why_not_kept() if kind == "cpu" else "only where a run computes on a CPU"
    return "kept by `autoamp run`" if why is None else f"not kept: {why}"


def _lists_and_names(kind: str) -> dict[str, Any]:
    """Return what is found of the lists, and of the names that they are about; an error where they cannot be used."""
    try:
        return {"lists": probes.lists_of(kind), "names": probes.bound_names()}
    except ListFileError as error:
        return {"lists": {"error": str(error)}, "names": None}


def _sections(found: Mapping[str, Any], measured: Sequence[Measured]) -> list[tuple[str, list[str]]]:
    packages, device, lists, names = found["packages"], found["device"], found["lists"], found["names"]
    sections = [
        ("Packages", aligned([
            ("autoamp", packages["autoamp"]), ("torch", packages["torch"]), ("Python", packages["python"]),
            *(("kernels" if place == 0 else "", line) for place, line in enumerate(found["kernels"])),
            ("apex", packages["apex"] or "no real apex; `autoamp run` lets `import apex` find autoamp"),
        ])),
        ("Device", aligned([
            (device["kind"], device["name"]), ("half units", device["units"]),
            ("default dtype", f"{device['default']}; {device['run_default']} for `autoamp run`"),
            ("fp32 matmul", f"precision {device['fp32_matmul']!r}"),
            ("freed memory", found["freed_memory"]),
        ])),
    ]  # fmt: skip
    if measured:
        sections.append((_measured_heading(measured[0]), _measured_lines(measured)))
    if "error" in lists:
        why = "cannot be used, here and in whatever calls autoamp.init():"
        return [*sections, ("Lists", [why, *textwrap.wrap(lists["error"], COLUMNS - 2, break_long_words=False,
                                                          break_on_hyphens=False)])]  # fmt: skip
    files = [(f"{count} rules", path) for path, count in lists["used"].items()]
    sections.append(("Lists", aligned([
        ("shipped sets", ", ".join(lists["shipped"])), ("AUTOAMP_LISTS", lists["environment"] or "not set"), *files,
        *([("lacking here", ", ".join(lists["lacking"]))] if lists["lacking"] else []),
        *([("not imported", ", ".join(lists["waiting"]))] if lists["waiting"] else []),
        *(("[modules]" if place == 0 else "", line) for place, line in enumerate(lists["modules"])),
    ])))  # fmt: skip
    sections.append(("Names bound before init", _name_lines(names)))
    return sections


def _measured_heading(one: Measured) -> str:
    return (
        f"Measured: matmul of {one.size} x {one.size}, elementwise op on {one.elements / 1e6:.0f} million "
        f"(median of {REPEATS} repeats, lowest to highest)"
    )


def _measured_lines(measured: Sequence[Measured]) -> list[str]:
    unit, factor = ("TFLOP/s", 1e12) if measured[0].flops.median > 1e12 else ("GFLOP/s", 1e9)
    rows = [("", unit, "", "of fp32", "GB/s", "", "of fp32")]
    for one in measured:
        speeds = (f"{ratio.median:.2f}" for ratio in (one.matmul, one.elementwise))
        flops, bytes_ = _cells(one.flops, factor), _cells(one.bytes, 1e9)
        rows.append((one.dtype, *flops, next(speeds), *bytes_, next(speeds)))
    return [*aligned(rows), "", *(one.verdict for one in measured if one.dtype != "fp32")]


def _cells(spread: Spread, factor: float) -> tuple[str, str]:
    return f"{spread.median / factor:.1f}", f"({spread.low / factor:.1f} to {spread.high / factor:.1f})"


def _name_lines(names: Mapping[str, Sequence[str]]) -> list[str]:
    lines = []
    for found, what in (
        (names["rebound"], "are rebound by init"),
        (names["unreached"], "keep torch's own: init does not reach them"),
    ):
        lines.append(f"{len(found)} {what}" + (":" if found else ""))
        lines += [f"  {name}" for name in found]
    return lines
