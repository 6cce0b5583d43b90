"""Histograms of binary exponents, and what of them a half dtype cannot hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["FORMATS", "Exponents"]

_BINS, _BIAS = 256, 127
_TOP_OF_HALF = 15 + _BIAS
# The highest 11 of 23 bits: with all of them set, rounding to fp16's 10 carries into the exponent. 65520 is the first.
_ROUNDS_UP = 0x7FF000

FORMATS: dict[str, tuple[int, int, int]] = {"float16": (-25, -14, 16), "bfloat16": (-134, -126, 128)}
"""By half dtype three binary exponents: what is below the first becomes 0, what is below the second subnormal, and what
has the third or more overflows (IEEE 754 binary16; bfloat16 has the exponents of binary32)."""


class Exponents:
    """How many elements have each binary exponent: ``e`` for magnitudes from ``2 ** e`` to below ``2 ** (e + 1)``.

    The exponents are those of fp32, -126 to 127; -127 stands for all fp32 subnormals, which in bf16 count as subnormal.
    Overflows in fp16 are exact, as rounding takes values of 65520 and more to inf. Values that only rounding takes over
    another limit (2 ** 128 in bf16, or exactly 2 ** -25) count as within it.

    Attributes:
        counts: int64 of 254 + 2 bins on the CPU: bin ``e + 127``, the last for inf and nan.
        rounding_up: How many of each bin fp16's 11 bits round to the next power of two; of the same shape.
        zeros: How many elements are 0; they are in no bin.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(_BINS, dtype=torch.int64)
        self.rounding_up = torch.zeros(_BINS, dtype=torch.int64)
        self.zeros = 0

    def add(self, tensor: Tensor, *, at_any_scale: bool = True) -> None:
        """Count the elements of a floating tensor of any shape; fp64 is rounded to fp32 first.

        Args:
            tensor: What is counted.
            at_any_scale: Whether overflows at other scales than 1 are to be exact too, which takes another pass.
        """
        values = tensor.detach().float().contiguous().flatten()
        bits = values.view(torch.int32)
        counts = torch.bincount((bits >> 23) & 0xFF, minlength=_BINS).cpu()
        if int(counts[0]):
            zeros = len(values) - int(values.count_nonzero())
            counts[0] -= zeros
            self.zeros += zeros
        self.counts += counts
        if at_any_scale or int(counts[_TOP_OF_HALF]):
            rounded = bits[(bits & _ROUNDS_UP) == _ROUNDS_UP]
            self.rounding_up += torch.bincount((rounded >> 23) & 0xFF, minlength=_BINS).cpu()

    def include(self, other: Exponents) -> None:
        """Add another histogram."""
        self.counts += other.counts
        self.rounding_up += other.rounding_up
        self.zeros += other.zeros

    @property
    def elements(self) -> int:
        """How many elements were counted, zeros, inf and nan among them."""
        return int(self.counts.sum()) + self.zeros

    @property
    def nonfinite(self) -> int:
        """How many elements are inf or nan."""
        return int(self.counts[-1])

    @property
    def largest(self) -> int | None:
        """The largest exponent of a finite element; None where all are 0."""
        found = self.counts[:-1].nonzero()
        return int(found[-1]) - _BIAS if len(found) else None

    def in_format(self, dtype: str, shift: int = 0) -> dict[str, int]:
        """Return how many finite elements a half dtype would make 0, subnormal or inf.

        Args:
            dtype: A key of `FORMATS`.
            shift: Added to each exponent: the binary logarithm of a loss scale.

        Returns:
            ``{"underflow": ..., "subnormal": ..., "overflow": ...}``.
        """
        zero, normal, top = (min(max(limit - shift + _BIAS, 0), _BINS - 1) for limit in FORMATS[dtype])
        finite = self.counts[:-1]
        over = int(finite[top:].sum())
        if dtype == "float16" and 0 < top < _BINS - 1:
            over += int(self.rounding_up[top - 1])
        return {"underflow": int(finite[:zero].sum()), "subnormal": int(finite[zero:normal].sum()), "overflow": over}

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"exponents": {"-3": 17, ...}, "rounding_up": {"-3": 2, ...}, "zeros": ..., "nonfinite": ...}``.

        Bins without elements are left out.
        """
        return {
            "exponents": _filled(self.counts),
            "rounding_up": _filled(self.rounding_up),
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
        }


def _filled(counts: Tensor) -> dict[str, int]:
    return {str(int(e) - _BIAS): int(counts[e]) for e in counts[:-1].nonzero().flatten()}
