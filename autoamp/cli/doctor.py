"""`autoamp doctor`: looks at the device, the lists and the names bound before `init`, and prints what it finds."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import platform
import sys
from collections import Counter

import torch
from torch.utils.benchmark import Timer

from autoamp.apex.alias import added_to_real_apex, real_apex
from autoamp.cli.memory import why_not_kept
from autoamp.cli.output import aligned, show
from autoamp.core import (
    ENVIRONMENT_VARIABLE,
    Region,
    Settings,
    check_device,
    device_type_of,
    disable_casts,
    expand,
    shipped_sets,
    versions,
)
from autoamp.errors import ListFileError, UsageError, kind_of
from autoamp.half_units import HALF_NAMES, default_half_dtype, half_dtype_with_units, has_units, missing_units
from autoamp.kernels import backends
from autoamp.tensors import dtype_name
from autoamp.tools import BaseHandle, Consistency, current_handle, init


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
    kind = device_type_of(chosen.device_type)
    check_device(kind)
    sections, code = {"Packages": _packages(), "Device": _device(kind)}, 0
    if not chosen.quick:
        sections["Measured"] = _measured(kind)
    try:
        sections["Lists"] = _lists(kind)
        with Region[BaseHandle](True, Settings.from_arguments()) as handle:
            names = sorted(name for name in handle.late_bound if not name.startswith("torch."))
        told = f"{len(names)} are rebound by init" + (":" if names else "")
        sections["Names bound before init"] = [told, *(f"  {name}" for name in names)]
    except ListFileError as error:
        sections["Lists"], code = ["cannot be used, here and by autoamp.init():", str(error)], 1
    if chosen.consistency is not None and code == 0:
        found = _consistency(chosen.consistency, kind)
        sections[f"Consistency of {chosen.consistency}"] = str(found).splitlines()
        code = {True: 0, False: 1, None: 4}[found.is_consistent]
    for heading, lines in sections.items():
        show(heading)
        sys.stdout.write("".join(f"  {line}\n" for line in lines) + "\n")
    return code


def _rows(*rows: tuple[str, ...]) -> list[str]:
    """Return lines of a label and its values, which are below one another; none for a label without values."""
    return aligned([("" if place else label, value) for label, *values in rows for place, value in enumerate(values)])


def _packages() -> list[str]:
    """Return the versions of the packages that matter, the compiled kernels, and whether there is a real apex."""
    found, apex = versions(), real_apex() or "no real apex; `autoamp run` lets `import apex` find autoamp"
    adds = "; autoamp adds the modules that it lacks, such as apex.amp" if "amp" in added_to_real_apex() else ""
    return _rows(
        ("autoamp", found["autoamp"]), ("torch", found["torch"]), ("Python", found["python"]),
        ("kernels", *map(str, backends())), ("apex", f"{apex}{adds}"),
    )  # fmt: skip


def _device(kind: str) -> list[str]:
    """Return what casts would act on: the device, the half dtypes that it has units for, and the default ones."""
    name = kind
    if kind == "cpu":
        cpu = torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine()
        threads = torch.get_num_threads()
        name = f"{cpu}, {threads} thread{'s' * (threads != 1)}"
    elif kind == "cuda":
        major, minor = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    default = default_half_dtype(kind)
    by_init = default if has_units(default, kind) else torch.float32
    in_runs = half_dtype_with_units(kind) or torch.float32
    units = [half for dtype, half in HALF_NAMES.items() if has_units(dtype, kind)]
    lacking = [] if has_units(default, kind) else [missing_units(default, kind)]
    if kind not in ("cpu", "cuda", "mps") or (kind == "cuda" and torch.version.hip is not None):
        units, lacking = ["not known; see the measurement"], []
    why = why_not_kept() if kind == "cpu" else "only where a run computes on a CPU"
    return _rows(
        (kind, name), ("half units", ", but ".join(filter(None, [", ".join(units), *lacking]))),
        ("default dtype", f"{dtype_name(by_init)}; {dtype_name(in_runs)} for `autoamp run`"),
        ("fp32 matmul", f"precision {torch.get_float32_matmul_precision()!r}"),
        ("freed memory", "kept by `autoamp run`" if why is None else f"not kept: {why}"),
    )  # fmt: skip


def _measured(kind: str) -> list[str]:
    """Return how many times as fast as in fp32 a matmul is in each half dtype: its median over half a second."""
    size, found = 512 if kind == "cpu" else 4096, {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        matrix = torch.randn(size, size, device=kind).to(dtype)
        with disable_casts():
            found[dtype] = Timer("matrix @ matrix", globals={"matrix": matrix}).blocked_autorange(min_run_time=0.5)
    noise = " (noisy: run it again when nothing else runs)" if any(one.has_warnings for one in found.values()) else ""
    full = found.pop(torch.float32).median
    return [
        f"{dtype_name(dtype)}: a matmul of {size} x {size} is {_speed(full / half.median)} fp32{noise}"
        for dtype, half in found.items()
    ]


def _speed(ratio: float) -> str:
    return f"{ratio:.2g} times as fast as in" if ratio >= 1 else f"{1 / ratio:.2g} times slower than in"


def _lists(kind: str) -> list[str]:
    """Return the lists that `autoamp.init` would use here for a device type. ListFileError: one cannot be used."""
    table = Settings.from_arguments(device_type=kind).table
    found = expand(table)
    used = sorted(Counter(rule.origin.path for rule in table.rules).items())
    lacking, waiting = ([", ".join(rule.target for rule in rules)] for rules in (found.skipped, found.deferred))
    return _rows(
        ("shipped sets", ", ".join(shipped_sets())),
        ("AUTOAMP_LISTS", os.environ.get(ENVIRONMENT_VARIABLE) or "not set"),
        *((f"{count} rules", path) for path, count in used),
        ("lacking here", *filter(None, lacking)), ("not imported", *filter(None, waiting)),
        ("[modules]", *(f"{rule.pattern}: {rule.precision.value} ({rule.origin})" for rule in table.modules)),
    )  # fmt: skip


def _consistency(name: str, device_type: str) -> Consistency:
    """Compare the paths of the model that a function returns, under the handle that it made or a new one."""
    try:
        made = pkgutil.resolve_name(name)()
    except (Exception, SystemExit) as error:
        raise UsageError(f"--consistency {name}: {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple):
        raise UsageError(f"--consistency {name}: expected a tuple of a model and its inputs, got {kind_of(made)}")
    handle = current_handle() or init(device_type=device_type)
    try:
        return handle.consistency(*made)
    finally:
        handle.deactivate()
