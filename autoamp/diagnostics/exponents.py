"""Histograms of binary exponents, and what of them a half dtype cannot hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autoamp.tensors import iter_tensors

_BINS, _BIAS = 256, 127
# Half of the last of fp16's 11 bits, in the bits of fp32: adding it carries into the exponent where fp16 rounds up.
_HALF_BIT = 0x1000
# From here on the carry would make inf of a finite value, such as the largest of fp32.
_NO_CARRY = 0x7F7FF000

FORMATS: dict[str, tuple[int, int, int]] = {"float16": (-25, -14, 16), "bfloat16": (-134, -126, 128)}
"""By half dtype three binary exponents. Values below the first become 0, values below the second become subnormal, and
values from the third on overflow (IEEE 754 binary16; bfloat16 has the exponents of binary32)."""


def readable_tensors(nested: Any) -> list[Tensor]:
    """Return the floating tensors in nested values whose elements can be read.

    Left out are sparse and nested tensors, those on the meta device, and classes that dispatch by themselves, such as
    DTensors. None can be read while a CUDA graph is captured: nothing is computed then.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return []
    found = (one for one in iter_tensors(nested) if one.is_floating_point() and one.layout is torch.strided)
    own = Tensor.__torch_dispatch__
    return [one for one in found if not (one.is_meta or one.is_nested) and type(one).__torch_dispatch__ is own]


class Exponents:
    """How many elements have each binary exponent: ``e`` for magnitudes from ``2 ** e`` to below ``2 ** (e + 1)``.

    Magnitudes are rounded to fp16's 11 bits first, so that overflows in fp16 are exact at each scale: 65520 and more
    becomes inf. The exponents are those of fp32, -126 to 127; -127 stands for all fp32 subnormals, which in bf16 count
    as subnormal. Values that only rounding takes over another limit (2 ** 128 in bf16, or exactly 2 ** -25) count as
    within it.

    Attributes:
        counts: int64 of 254 + 2 bins on the CPU: bin ``e + 127``, the last for inf and nan.
        zeros: How many elements are 0; they are in no bin.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(_BINS, dtype=torch.int64)
        self.zeros = 0

    def add(self, *tensors: Tensor) -> None:
        """Count the elements of those tensors that can be read (`readable_tensors`); fp64 is rounded to fp32 first."""
        for tensor in readable_tensors(tensors):
            bits = tensor.detach().float().contiguous().flatten().view(torch.int32) & 0x7FFFFFFF
            rounded = torch.where(bits < _NO_CARRY, bits + _HALF_BIT, bits)
            # Zeros have the first bin, so that one copy from the device brings all counts.
            found = torch.bincount((rounded >> 23) + (bits > 0), minlength=_BINS + 1).cpu()
            self.zeros += int(found[0])
            self.counts += found[1:]

    @classmethod
    def total(cls, several: Iterable[Exponents]) -> Exponents:
        """Return the sum of several histograms."""
        total = cls()
        for found in several:
            total.counts += found.counts
            total.zeros += found.zeros
        return total

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
        parts = {"underflow": slice(zero), "subnormal": slice(zero, normal), "overflow": slice(top, None)}
        return {name: int(self.counts[:-1][part].sum()) for name, part in parts.items()}

    def to_dict(self, shift: int = 0) -> dict[str, Any]:
        """Return ``{"exponents": {"-3": 17, ...}, "zeros": ..., "nonfinite": ..., "largest": ..., "float16": ...}``.

        Args:
            shift: That of `in_format`, whose result is added for each half dtype.
        """
        return {
            "exponents": {str(int(e) - _BIAS): int(self.counts[e]) for e in self.counts[:-1].nonzero().flatten()},
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
            "largest": self.largest,
            **{dtype: self.in_format(dtype, shift) for dtype in FORMATS},
        }
