"""How fast fp16 and bf16 are on a device, beside fp32: a matmul and an elementwise op, timed in turn, several times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoamp import runtime
from autoamp.tuning import time_of

__all__ = ["REPEATS", "Measured", "Spread", "measure"]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Speeds of half precision over that of fp32: above the first its casts pay, below the second they cost time.
PAYS = 1.2
SLOWER = 0.9
# How often the whole measurement is made. Ratios that differ by more than a factor between repeats tell nothing, unless
# the verdict is the same at both ends.
REPEATS = 5
NOISE = 1.5


@dataclass(frozen=True)
class Spread:
    """The median of several repeats, with the lowest and the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @property
    def ratio(self) -> float:
        """The highest over the lowest."""
        return self.high / self.low


@dataclass(frozen=True)
class Measured:
    """One dtype against fp32.

    Attributes:
        flops: Of a square matmul, floating-point operations a second.
        bytes: Of an elementwise op, bytes read and written a second.
        matmul: How many times as fast as in fp32 the matmul is.
        elementwise: The same of the elementwise op, for as many elements.
        size: The matmul's edge.
        elements: How many elements the elementwise op has.
    """

    dtype: str
    flops: Spread
    bytes: Spread
    matmul: Spread
    elementwise: Spread
    size: int
    elements: int

    @property
    def verdict(self) -> str:
        """Say whether this dtype pays here, or that the repeats differ too much to tell."""
        times = (
            f"matmul {_times(self.matmul.median)}, memory-bound ops {_times(self.elementwise.median)} the speed of fp32"
        )
        lowest, highest = (self._verdict_at(*ends) for ends in (
            (self.matmul.low, self.elementwise.low), (self.matmul.high, self.elementwise.high)
        ))  # fmt: skip
        if lowest != highest and max(self.matmul.ratio, self.elementwise.ratio) > NOISE:
            return (
                f"{self.dtype}: too noisy to tell: matmul {_range(self.matmul)}, memory-bound ops "
                f"{_range(self.elementwise)} times the speed of fp32; run it again when nothing else runs"
            )
        pays, remark = self._verdict_at(self.matmul.median, self.elementwise.median)
        return f"{self.dtype} {pays}: {times}{remark}"

    @staticmethod
    def _verdict_at(matmul: float, elementwise: float) -> tuple[str, str]:
        """Return the verdict at these speeds, and what is to be added to it."""
        if matmul >= PAYS:
            return "pays here", ""
        if matmul < SLOWER:
            return "does not pay here", ". It saves memory and costs time"
        if elementwise >= PAYS:
            return "pays here for memory-bound models only", ""
        return "does not pay here", ". It saves memory, not time"


def _times(ratio: float) -> str:
    return f"{_number(ratio)} times"


def _range(spread: Spread) -> str:
    return f"{_number(spread.low)} to {_number(spread.high)}"


def _number(ratio: float) -> str:
    # Two digits at least: a CPU without fp16 units is a hundred times slower.
    return f"{ratio:.{0 if ratio >= 9.95 else 1 if ratio >= 0.095 else 3}f}"


def measure(kind: str, seconds: float = 2.0) -> list[Measured]:
    """Time a matmul and an elementwise op in fp32, fp16 and bf16, in turn, so that all meet the same conditions.

    That is done `REPEATS` times, and a `Spread` says how the repeats differ.

    Args:
        kind: The device type.
        seconds: How long all of it may take, more or less; warming up comes on top.
    """
    each = max(seconds / (2 * REPEATS * len(DTYPES)), 1e-6)
    elements = 2**26 if kind != "cpu" else 2**23
    with runtime.disable_casts(), torch.no_grad():
        size, products = _matmuls(kind)
        copies = {name: _copy(kind, elements, dtype) for name, dtype in DTYPES.items()}
        matmul, elementwise = (
            [{name: time_of(call, each) for name, call in calls.items()} for _ in range(REPEATS)]
            for calls in (products, copies)
        )
    return [
        Measured(
            dtype=name,
            flops=Spread.of([2 * size**3 / spent[name] for spent in matmul]),
            bytes=Spread.of([2 * elements * dtype.itemsize / spent[name] for spent in elementwise]),
            matmul=Spread.of([spent["fp32"] / spent[name] for spent in matmul]),
            elementwise=Spread.of([spent["fp32"] / spent[name] for spent in elementwise]),
            size=size,
            elements=elements,
        )
        for name, dtype in DTYPES.items()
    ]


def _matmuls(kind: str) -> tuple[int, dict[str, Callable[[], Any]]]:
    """Return matmuls large enough to keep the device busy for milliseconds, and small enough for the slowest dtype."""
    size = 256
    while True:
        calls = {name: _matmul(kind, size, dtype) for name, dtype in DTYPES.items()}
        spent = [time_of(call, 1e-6) for call in calls.values()]
        if size == 8192 or min(spent) > 4e-3 or max(spent) > 15e-3:
            return size, calls
        size *= 2


def _matmul(kind: str, size: int, dtype: torch.dtype) -> Callable[[], Any]:
    a, b = (torch.randn(size, size, device=kind).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _copy(kind: str, elements: int, dtype: torch.dtype) -> Callable[[], Any]:
    x = torch.ones(elements, device=kind, dtype=dtype)
    out = torch.empty_like(x)
    return lambda: torch.mul(x, 2.0, out=out)
