"""`autoamp doctor`: looks at the device, the lists and the names taken before `init`, and prints what it finds."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from autoamp.cli import probes
from autoamp.cli.measurements import REPEATS, Measured, measure
from autoamp.cli.output import aligned, show
from autoamp.errors import ListFileError, UsageError

__all__ = ["doctor"]


def doctor(chosen: argparse.Namespace) -> int:
    """Look around and print what is found. Returns the exit code: 1 if the lists of this place cannot be used."""
    sys.path[:0] = [] if sys.flags.safe_path or os.getcwd() in sys.path else [os.getcwd()]
    for module in chosen.imports:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise UsageError(f"--import {module}: {type(error).__name__}: {error}") from error
    device = probes.device_of(chosen.device_type)
    kind = device["kind"]
    try:
        lists, names = probes.lists_of(kind), probes.bound_names()
    except ListFileError as error:
        lists, names = {"error": str(error)}, None
    measured = [] if chosen.quick else measure(kind)
    found: dict[str, Any] = {
        "packages": probes.packages(), "kernels": probes.kernels(), "device": device,
        "freed_memory": probes.freed_memory(kind), "lists": lists, "names": names,
        "measured": [{**dataclasses.asdict(one), "verdict": one.verdict} for one in measured],
    }  # fmt: skip
    if chosen.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        for heading, lines in _sections(found, measured).items():
            show(heading)
            sys.stdout.write("".join(f"  {line}\n" for line in lines) + "\n")
    return int(names is None)


def _sections(found: Mapping[str, Any], measured: Sequence[Measured]) -> dict[str, list[str]]:
    """Return the lines of each section by its heading."""
    packages, device, lists = found["packages"], found["device"], found["lists"]
    apex = packages["apex"] or "no real apex; `autoamp run` lets `import apex` find autoamp"
    sections = {
        "Packages": _rows(
            ("autoamp", packages["autoamp"]), ("torch", packages["torch"]), ("Python", packages["python"]),
            ("kernels", *found["kernels"]), ("apex", apex),
        ),
        "Device": _rows(
            (device["kind"], device["name"]), ("half units", device["units"]),
            ("default dtype", f"{device['default']}; {device['run_default']} for `autoamp run`"),
            ("fp32 matmul", f"precision {device['fp32_matmul']!r}"), ("freed memory", found["freed_memory"]),
        ),
    }  # fmt: skip
    if measured:
        sections[f"Measured (median of {REPEATS} repeats)"] = [one.verdict for one in measured]
    if "error" in lists:
        return {**sections, "Lists": ["cannot be used, here and by autoamp.init():", lists["error"]]}
    sections["Lists"] = _rows(
        ("shipped sets", ", ".join(lists["shipped"])), ("AUTOAMP_LISTS", lists["environment"] or "not set"),
        *((f"{count} rules", path) for path, count in lists["used"].items()),
        ("lacking here", *filter(None, [", ".join(lists["lacking"])])),
        ("not imported", *filter(None, [", ".join(lists["waiting"])])),
        ("[modules]", *lists["modules"]),
    )  # fmt: skip
    sections["Names bound before init"] = _name_lines(found["names"])
    return sections


def _rows(*rows: tuple[str, ...]) -> list[str]:
    """Return lines of a label and its values, which are below one another; none for a label without values."""
    return aligned([("" if place else label, value) for label, *values in rows for place, value in enumerate(values)])


def _name_lines(names: Mapping[str, Sequence[str]]) -> list[str]:
    lines = []
    for found, what in (
        (names["rebound"], "are rebound by init"),
        (names["unreached"], "keep torch's own: init does not reach them"),
    ):
        lines.append(f"{len(found)} {what}" + (":" if found else ""))
        lines += [f"  {name}" for name in found]
    return lines
