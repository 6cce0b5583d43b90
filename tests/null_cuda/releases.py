"""Dtypes of the listed ops' results under autoamp and under torch.autocast, beside those on other releases of torch.

python -m tests.null_cuda.releases > 2.13.json          # on each release; needs no CUDA
python -m tests.null_cuda.releases 2.13.json 2.14.json  # the table of docs/lists.md, and the ops that differ

Arguments are OpInfo samples: on the CPU as they are, on CUDA as tensors without memory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

import autoamp
from autoamp.rules import CastPolicy, shipped_table
from autoamp.runtime import api
from tests.null_cuda.ops import spelled
from tests.null_cuda.training import HALVES
from tests.sweep.cases import MODES, OPS, Call

SAMPLES = 2
WAYS = ("autoamp", "torch.autocast")


def listed(device_type: str) -> list[str]:
    """Return the OpInfos of the ops that the lists put under a policy."""
    rules = [rule for name in ("default", "bf16") for rule in shipped_table(name, device_type).rules]
    names = {rule.target.rpartition(".")[2] for rule in rules if rule.policy is not CastPolicy.NONE}
    return [name for name, op in OPS.items() if op.name.rpartition(".")[2].removeprefix("linalg_") in names]


@contextlib.contextmanager
def way(name: str, device_type: str, half: torch.dtype) -> Iterator[None]:
    """Cast by autoamp or by torch.autocast, on a device that need not be there."""
    if name == "autoamp":
        with mock.patch.object(api, "check_device"):
            handle = autoamp.init(device_type=device_type, dtype=half)
        try:
            yield
        finally:
            handle.deactivate()
        return
    torch.set_autocast_dtype(device_type, half)
    torch.set_autocast_enabled(device_type, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, False)
        torch.clear_autocast_cache()


def dtypes(function: Callable[..., Any], call: Call, device_type: str) -> list[str]:
    """Return the dtypes of what a call returns; none where it raises an error."""
    args, kwargs = tree_unflatten(list(call.leaves), call.spec)
    try:
        if device_type == "cpu":
            result = function(*args, **kwargs)
        else:
            with FakeTensorMode() as mode:
                args, kwargs = tree_map(functools.partial(without_memory, mode, device_type), (args, kwargs))
                result = function(*args, **kwargs)
    except Exception:  # no kernel for these dtypes, or none without memory
        return []
    return [str(leaf.dtype).removeprefix("torch.") for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def without_memory(mode: FakeTensorMode, device_type: str, leaf: Any) -> Any:
    return torch.empty_like(mode.from_tensor(leaf), device=device_type) if isinstance(leaf, Tensor) else leaf


def found() -> dict[str, list[str]]:
    """Return the dtypes by device, half dtype, way, op and sample."""
    # Before torch is patched: names are looked up at each call.
    made = {name: (spelled(OPS[name]), samples(name)) for name in sorted({*listed("cpu"), *listed("cuda")})}
    values = {}
    for device_type, (half_name, half), name in itertools.product(("cpu", "cuda"), HALVES.items(), WAYS):
        with way(name, device_type, half):
            for op_name in listed(device_type):
                function, calls = made[op_name]
                for (number, call), (mode, dtype_of) in itertools.product(enumerate(calls), MODES.items()):
                    cast = call.cast(functools.partial(dtype_of, half))
                    key = f"{device_type} {half_name} {name} {op_name} {number} {mode}"
                    values[key] = dtypes(function, cast, device_type)
    return values


def samples(name: str) -> list[Call]:
    torch.manual_seed(0)
    made = itertools.islice(OPS[name].sample_inputs("cpu", torch.float32), SAMPLES)
    return [Call.of((sample.input, *sample.args), sample.kwargs) for sample in made]


def compare(files: list[str]) -> None:
    """Print how many calls ran on both releases, and the ops whose results have other dtypes."""
    runs = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    print("| torch | cast by | device | half | calls | other dtypes |\n|---|---|---|---|---:|---|")
    first = runs[0]["dtypes"]
    for run in runs[1:]:
        counts: Counter[str] = Counter()
        others: dict[str, set[str]] = {}
        for key, dtypes_then in first.items():
            dtypes_now = run["dtypes"].get(key)
            if dtypes_then and dtypes_now:
                device_type, half, cast_by, op, *_ = key.split()
                place = f"{cast_by} | {device_type} | {half}"
                counts[place] += 1
                if dtypes_then != dtypes_now:
                    others.setdefault(place, set()).add(op)
        for place, count in sorted(counts.items()):
            names = ", ".join(f"`{name}`" for name in sorted(others.get(place, ()))) or "none"
            print(f"| {runs[0]['torch']}, {run['torch']} | {place} | {count} | {names} |")


if __name__ == "__main__":
    if sys.argv[1:]:
        compare(sys.argv[1:])
    else:
        warnings.simplefilter("ignore")
        json.dump({"torch": torch.__version__, "dtypes": found()}, sys.stdout, indent=0)
