"""`autoamp doctor`: looks at the device, the lists and the names taken before `init`, and prints what it finds."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from autoamp.cli import probes
from autoamp.cli.measurements import REPEATS, measure
from autoamp.cli.output import aligned, show
from autoamp.diagnostics import Consistency
from autoamp.errors import ListFileError, UsageError, kind_of
from autoamp.runtime import current_handle, init


def doctor(chosen: argparse.Namespace) -> int:
    """Look around and print what is found.

    Returns the exit code: 1 if the lists of this place cannot be used, or a model is not consistent; 4 if it is unknown
    whether it is.
    """
    sys.path[:0] = [] if sys.flags.safe_path or os.getcwd() in sys.path else [os.getcwd()]
    for module in chosen.imports:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise UsageError(f"--import {module}: {type(error).__name__}: {error}") from error
    device = probes.device_of(chosen.device_type)
    kind = device["kind"]
    try:
        lists, code = _of_lists(probes.lists_of(kind), probes.bound_names()), 0
    except ListFileError as error:
        lists, code = {"Lists": ["cannot be used, here and by autoamp.init():", str(error)]}, 1
    packages: Mapping[str, Any] = probes.packages()
    apex = packages["apex"] or "no real apex; `autoamp run` lets `import apex` find autoamp"
    sections = {
        "Packages": _rows(
            ("autoamp", packages["autoamp"]), ("torch", packages["torch"]), ("Python", packages["python"]),
            ("kernels", *probes.kernels()), ("apex", apex),
        ),
        "Device": _rows(
            (kind, device["name"]), ("half units", device["units"]),
            ("default dtype", f"{device['default']}; {device['run_default']} for `autoamp run`"),
            ("fp32 matmul", f"precision {device['fp32_matmul']!r}"), ("freed memory", probes.freed_memory(kind)),
        ),
    }  # fmt: skip
    if not chosen.quick:
        sections[f"Measured (median of {REPEATS} repeats)"] = [one.verdict for one in measure(kind)]
    if chosen.consistency is not None and code == 0:
        found = _consistency(chosen.consistency, kind)
        lists = {**lists, f"Consistency of {chosen.consistency}": str(found).splitlines()}
        code = {True: 0, False: 1, None: 4}[found.is_consistent]
    for heading, lines in {**sections, **lists}.items():
        show(heading)
        sys.stdout.write("".join(f"  {line}\n" for line in lines) + "\n")
    return code


def _consistency(name: str, device_type: str) -> Consistency:
    """Compare the paths of the model that a function returns, under the handle that it made or a new one."""
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (Exception, SystemExit) as error:
        raise UsageError(f"--consistency {name}: {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple):
        raise UsageError(f"--consistency {name}: expected a tuple of a model and its inputs, got {kind_of(made)}")
    handle = current_handle() or init(device_type=device_type)
    try:
        return handle.consistency(*made)
    finally:
        handle.deactivate()


def _of_lists(lists: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the lines on the lists, and on the names that were bound before `init`, by their headings."""
    rows = _rows(
        ("shipped sets", ", ".join(lists["shipped"])), ("AUTOAMP_LISTS", lists["environment"] or "not set"),
        *((f"{count} rules", path) for path, count in lists["used"].items()),
        ("lacking here", *filter(None, [", ".join(lists["lacking"])])),
        ("not imported", *filter(None, [", ".join(lists["waiting"])])),
        ("[modules]", *lists["modules"]),
    )  # fmt: skip
    return {"Lists": rows, "Names bound before init": _name_lines(names)}


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
