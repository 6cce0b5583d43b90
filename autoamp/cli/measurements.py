"""How fast fp16 and bf16 are on a device, compared with fp32: a matmul and an elementwise op, timed several times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoamp import runtime
from autoamp.tuning import time_of

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Speeds of half precision over that of fp32: above the first its casts pay, below the second they cost time.
PAYS = 1.2
SLOWER = 0.9
# How often the whole measurement is repeated. If ratios differ by more than a factor between repeats, and so does the
# verdict, they mean nothing.
REPEATS = 5
NOISE = 1.5


def verdict(dtype: str, matmul: Sequence[float], elementwise: Sequence[float]) -> str:
    """Return whether a half dtype pays here, or that the repeats differ too much to tell.

    Args:
        dtype: ``"fp16"`` or ``"bf16"``.
        matmul: The speed of a matmul in each repeat, as a multiple of that in fp32.
        elementwise: That of an elementwise op.
    """
    both = (matmul, elementwise)
    lowest, highest = _verdict_at(*map(min, both)), _verdict_at(*map(max, both))
    if lowest != highest and any(max(ratios) > NOISE * min(ratios) for ratios in both):
        of_matmul, of_elementwise = (f"{_number(min(ratios))} to {_number(max(ratios))}" for ratios in both)
        return (
            f"{dtype}: too noisy to tell: matmul {of_matmul}, memory-bound ops {of_elementwise} times the speed of "
            "fp32; run it again when nothing else runs"
        )
    medians = [statistics.median(ratios) for ratios in both]
    of_matmul, of_elementwise = map(_number, medians)
    pays, remark = _verdict_at(*medians)
    return (
        f"{dtype} {pays}: matmul {of_matmul} times, memory-bound ops {of_elementwise} times the speed of fp32{remark}"
    )


def _verdict_at(matmul: float, elementwise: float) -> tuple[str, str]:
    """Return the verdict at these speeds, and a remark on it."""
    if matmul >= PAYS:
        return "pays here", ""
    if matmul < SLOWER:
        return "does not pay here", ". It saves memory and costs time"
    if elementwise >= PAYS:
        return "pays here for memory-bound models only", ""
    return "does not pay here", ". It saves memory, not time"


def _number(ratio: float) -> str:
    # Two digits at least: a CPU without fp16 units is a hundred times slower.
    return f"{ratio:.{0 if ratio >= 9.95 else 1 if ratio >= 0.095 else 3}f}"


def measure(kind: str, seconds: float = 2.0) -> dict[str, tuple[list[float], list[float]]]:
    """Return the speeds of a matmul and of an elementwise op in both half dtypes, as `verdict` takes them.

    All dtypes are timed in turn, so that all meet the same conditions.

    Args:
        kind: The device type.
        seconds: About how long all of it takes, after a warm-up.
    """
    each = max(seconds / (2 * REPEATS * len(DTYPES)), 1e-6)
    with runtime.disable_casts(), torch.no_grad():
        matmul = _speeds(_matmuls(kind), each)
        elementwise = _speeds({name: _elementwise(kind, dtype) for name, dtype in DTYPES.items()}, each)
    return {name: (matmul[name], elementwise[name]) for name in ("fp16", "bf16")}


def _speeds(calls: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Return how many times as fast as fp32 each dtype is, in each repeat."""
    rounds = [{name: time_of(call, seconds) for name, call in calls.items()} for _ in range(REPEATS)]
    return {name: [spent["fp32"] / spent[name] for spent in rounds] for name in calls}


def _matmuls(kind: str) -> dict[str, Callable[[], Any]]:
    """Return matmuls large enough to keep the device busy for milliseconds, and small enough for the slowest dtype."""
    size = 256
    while True:
        calls = {name: _matmul(kind, size, dtype) for name, dtype in DTYPES.items()}
        spent = [time_of(call, 1e-6) for call in calls.values()]
        if size == 8192 or min(spent) > 4e-3 or max(spent) > 15e-3:
            return calls
        size *= 2


def _matmul(kind: str, size: int, dtype: torch.dtype) -> Callable[[], Any]:
    a, b = (torch.randn(size, size, device=kind).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _elementwise(kind: str, dtype: torch.dtype) -> Callable[[], Any]:
    x = torch.ones(2**23 if kind == "cpu" else 2**26, device=kind, dtype=dtype)
    out = torch.empty_like(x)
    return lambda: torch.mul(x, 2.0, out=out)
