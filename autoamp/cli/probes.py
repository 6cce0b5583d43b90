"""The findings of `autoamp doctor`: the device, the packages, the lists, and names that were bound before `init`.

Returns plain values; `doctor` prints them.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from autoamp.compat import added_to_real_apex, real_apex
from autoamp.diagnostics import versions
from autoamp.half_units import HALF_NAMES, default_half_dtype, half_dtype_with_units, has_units, missing_units
from autoamp.kernels import backends
from autoamp.memory import why_not_kept
from autoamp.ops import expand, owns_its_names
from autoamp.patching import original_of
from autoamp.rules import ENVIRONMENT_VARIABLE, CastTable, shipped_sets
from autoamp.runtime import Region, Settings, check_device, device_type_of
from autoamp.tensors import dtype_name


def default_table(lists: Any = None, kind: str | None = None, dtype: torch.dtype | None = None) -> CastTable:
    """Find and read the lists as `autoamp.init` would here, for a device type; None is the current accelerator's.

    ``dtype`` is the half dtype; None is the device's.

    Raises:
        ListFileError: A list cannot be used.
        UsageError: Torch knows no such device type, or no half precision for it.
    """
    return Settings.from_arguments(lists=lists, device_type=kind, dtype=dtype).table


def device_of(kind: str | None = None) -> dict[str, str]:
    """Describe the device that casts would act on; None is the current accelerator, else the CPU.

    Returns:
        ``kind``, its type; its ``name``; ``units``, the half dtypes that it has units for, in words; ``default`` and
        ``run_default``, the dtypes that `autoamp.init` and `autoamp run` take there, ``"float32"`` where nothing is
        cast; and ``fp32_matmul``, torch's setting: ``"highest"`` is true fp32, others allow TF32 or bf16.
    """
    kind = device_type_of(kind)
    check_device(kind)
    name = _name_of_cpu() if kind == "cpu" else _name_of_accelerator(kind)
    default, in_runs = default_half_dtype(kind), half_dtype_with_units(kind) or torch.float32
    taken = default if has_units(default, kind) else torch.float32
    return {
        "kind": kind, "name": name, "units": _units(kind, default), "default": dtype_name(taken),
        "run_default": dtype_name(in_runs),
        "fp32_matmul": torch.get_float32_matmul_precision(),
    }  # fmt: skip


def _units(kind: str, default: torch.dtype) -> str:
    """Return the half dtypes that a device computes in, and why not the default one."""
    if kind not in ("cpu", "cuda", "mps") or (kind == "cuda" and torch.version.hip is not None):
        return "not known; see the measurement"
    found = ", ".join(name for dtype, name in HALF_NAMES.items() if has_units(dtype, kind))
    return found if has_units(default, kind) else ", but ".join(filter(None, (found, missing_units(default, kind))))


def _name_of_cpu() -> str:
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def _name_of_accelerator(kind: str) -> str:
    if kind != "cuda":
        return kind
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"


# -- packages and lists --


def packages() -> dict[str, str | None]:
    """Return the versions of the packages that matter, and the path of a real apex, None if there is none."""
    real, added = real_apex(), added_to_real_apex()
    adds = "; autoamp adds the modules that it lacks, such as apex.amp" if "amp" in added else ""
    return {**versions(), "apex": f"{real}{adds}" if real else None}


def kernels() -> list[str]:
    """Return for each type of device whether there are compiled kernels for it, and why not."""
    return [str(one) for one in backends()]


def freed_memory(kind: str) -> str:
    """Return whether `autoamp run` keeps freed memory, and why not."""
    why = why_not_kept() if kind == "cpu" else "only where a run computes on a CPU"
    return "kept by `autoamp run`" if why is None else f"not kept: {why}"


def lists_of(kind: str) -> dict[str, Any]:
    """Return the lists that `autoamp.init` would use here for a device type.

    Returns:
        The ``shipped`` sets; ``environment``, the value of `AUTOAMP_LISTS`; ``used``, the number of rules from each
        file; ``lacking``, rules of shipped sets for ops that this torch lacks; ``waiting``, rules for modules that are
        not imported yet; and ``modules``, rules on modules, as lines.

    Raises:
        ListFileError: A list cannot be used.
    """
    table = default_table(kind=kind)
    expansion = expand(table)
    return {
        "shipped": shipped_sets(),
        "environment": os.environ.get(ENVIRONMENT_VARIABLE, ""),
        "used": dict(sorted(Counter(rule.origin.path for rule in table.rules).items())),
        "lacking": [rule.target for rule in expansion.skipped],
        "waiting": [rule.target for rule in expansion.deferred],
        "modules": [f"{rule.pattern}: {rule.precision.value} ({rule.origin})" for rule in table.modules],
    }


# -- names bound before init --


def bound_names() -> dict[str, list[str]]:
    """Find the references that imported modules hold to functions that `autoamp.init` patches.

    Returns:
        ``rebound``: module globals (``from torch import relu``), but torch's own; `autoamp.init` rebinds them.
        ``unreached``: items of containers, attributes of classes, default arguments, partials: it does not reach them.
    """
    with Region(True, Settings.from_arguments()) as handle:
        rebound = [name for name in handle.late_bound if not name.startswith("torch.")]
    originals = {id(target.original): target.original for target in expand(default_table()).targets}
    unreached = []
    for name, module in sorted(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not name.startswith("torch.") and not owns_its_names(name):
            for attribute, value in list(vars(module).items()):
                places = _places(value, name)
                unreached += [
                    f"{name}.{attribute}{place}" for place, held in places if id(original_of(held)) in originals
                ]
    return {"rebound": sorted(rebound), "unreached": list(dict.fromkeys(unreached))}


def _places(value: Any, module: str) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a global holds one level down, and how they are reached. Runs no code of the program."""
    if type(value) is dict:
        yield from ((f"[{key!r}]", item) for key, item in list(value.items()))
    elif type(value) in (list, tuple):
        yield from ((f"[{at}]", item) for at, item in enumerate(value))
    elif type(value) is functools.partial:
        yield ".func", value.func
    elif isinstance(value, types.FunctionType) and value.__module__ == module:
        yield from _defaults(value)
    elif isinstance(value, type) and value.__module__ == module:
        for name, held in list(vars(value).items()):
            plain = held.__func__ if isinstance(held, (staticmethod, classmethod)) else held
            yield f".{name}", plain
            if isinstance(plain, types.FunctionType):
                yield from ((f".{name}{place}", item) for place, item in _defaults(plain))


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    # From the last. A named tuple's constructor has more of them than its code has names.
    given = zip(reversed(names), reversed(function.__defaults__ or ()), strict=False)
    yield from ((f"({name}=)", held) for name, held in given)
    yield from ((f"({name}=)", held) for name, held in (function.__kwdefaults__ or {}).items())
