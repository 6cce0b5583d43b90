"""Hints of a trace: where casts cost more than they bring, each with its figure and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.diagnostics.op_names import spellings
from autoamp.diagnostics.rows import Hint, Row
from autoamp.diagnostics.tables import counted
from autoamp.tensors import HALF_DTYPES

__all__ = ["Islands", "hints_of"]


@dataclass(slots=True)
class _Island:
    """The results of an op that runs in fp32 on half arguments, and that are cast to half again.

    Attributes:
        row: The op.
        back: The last op that cast a result to half; None for the program itself.
        count: The number of results that were cast to half.
        bytes: The size of the casts to fp32 and back.
    """

    row: Row
    back: Row | None = None
    count: int = 0
    bytes: int = 0


class Islands:
    """Finds fp32 islands: ops in fp32 between half ops, maybe followed by ops on no list.

    Attributes:
        found: The islands by the id of their row.
    """

    def __init__(self) -> None:
        self.found: dict[int, _Island] = {}
        # By fp32 result: the op, and the bytes of the casts of its arguments. Entries end with their tensor.
        self._source_of: Any = WeakIdKeyDictionary()

    def add_call(self, row: Row | None, inputs: Sequence[Tensor], outputs: Iterable[Tensor]) -> None:
        """Note a call of a listed op, or of an op on no list, whose results belong to the island of its arguments.

        Args:
            row: The listed op; None for an op on no list.
            inputs: The floating arguments.
            outputs: The floating results.
        """
        source = None
        if row is None:
            source = next(filter(None, map(self._source_of.get, inputs)), None)
        elif row.policy != "fp16" and any(tensor.dtype in HALF_DTYPES for tensor in inputs):
            source = row, sum(tensor.numel() * 4 for tensor in inputs if tensor.dtype in HALF_DTYPES)
        for output in outputs:
            if source is not None and output.dtype is torch.float32:
                self._source_of[output] = source

    def add_cast(self, tensor: Tensor, result: Tensor, back: Row | None) -> None:
        """Note a cast, for an argument of an op or by the program itself."""
        source = self._source_of.get(tensor)
        if source is not None and result.dtype in HALF_DTYPES:
            row, widened = source
            island = self.found.setdefault(id(row), _Island(row))
            island.back = back
            island.count += 1
            island.bytes += widened + result.nbytes


def hints_of(unlisted: Iterable[Row], islands: Islands) -> tuple[Hint, ...]:
    """Return what a trace suggests, by bytes, most first."""
    found = [_of_island(island) for island in islands.found.values()]
    found += [_mixed_dtypes(row) for row in unlisted]
    return tuple(sorted(found, key=lambda hint: -hint.bytes))


def _of_island(island: _Island) -> Hint:
    row, back = island.row, "the program" if island.back is None else island.back.label
    return Hint(
        "fp32 island",
        row.label,
        f"{counted(island.count, 'result')} went back to half for {back}; {island.bytes:,} bytes for both casts",
        f"list it as fp16 or none if its values allow that; its rule is {row.policy} in {row.origin}",
        island.bytes,
    )


def _mixed_dtypes(row: Row) -> Hint:
    name = row.op.removeprefix("aten::")
    names = ", ".join(map(repr, spellings(name) or (name,)))
    dtypes = " and ".join(f"{count} {dtype}" for dtype, count in sorted(row.dtypes_in.items()))
    return Hint(
        "mixed dtypes on no list",
        row.label,
        f"{counted(row.calls, 'call')} got {dtypes}; torch widened {row.bytes_cast:,} bytes",
        f"list {names} as fp16 or promote, or cast one of the arguments before the call",
        row.bytes_cast,
    )
