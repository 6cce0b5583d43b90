"""What a trace suggests: where casts cost more than they bring, each with its figure and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.diagnostics.op_names import spellings
from autoamp.diagnostics.rows import Hint, Row
from autoamp.diagnostics.tables import counted
from autoamp.tensors import HALF_DTYPES

__all__ = ["Flow", "hints_of"]


class Flow:
    """Where cast activations come from and go to.

    Attributes:
        repeats: By the row of the first cast of an activation and that of another one to the same dtype: how often,
            and the bytes.
        islands: By the row of an op that runs in fp32 on half arguments and whose result, maybe through ops on no
            list, is cast to half again: how often, the bytes of both casts, and the row that casts back.
    """

    def __init__(self) -> None:
        self.repeats: dict[tuple[int, int], tuple[Row, Row, int, int]] = {}
        self.islands: dict[int, tuple[Row, int, int, Row | None]] = {}
        # By tensor, forgotten with it.
        self._casts_of: Any = WeakIdKeyDictionary()
        self._island_of: Any = WeakIdKeyDictionary()

    def cast(self, source: Tensor, result: Tensor, row: Row | None) -> None:
        """Take note of a copy in another dtype, made for a row, or by the program itself."""
        size = result.numel() * result.element_size()
        if source.dtype is torch.float32 and result.dtype in HALF_DTYPES:
            island = self._island_of.get(source)
            if island is not None:
                first, widened = island
                _, count, total, _ = self.islands.get(id(first), (first, 0, 0, None))
                self.islands[id(first)] = first, count + 1, total + size + widened, row
        if row is None or isinstance(source, Parameter):
            return
        before = self._casts_of.get(source) or {}
        version = getattr(source, "_version", 0) if not source.is_inference() else 0
        first = before.get((result.dtype, version))
        if first is None:
            self._casts_of[source] = {**before, (result.dtype, version): row}
        else:
            key = id(first), id(row)
            _, _, count, total = self.repeats.get(key, (first, row, 0, 0))
            self.repeats[key] = first, row, count + 1, total + size

    def ran(self, row: Row, inputs: Sequence[Tensor], outputs: Iterable[Tensor]) -> None:
        """Take note of what a listed op got and returned."""
        halves = [tensor for tensor in inputs if tensor.dtype in HALF_DTYPES]
        if halves and row.policy != "fp16":
            widened = sum(tensor.numel() * 4 for tensor in halves)
            for output in outputs:
                if output.dtype is torch.float32:
                    self._island_of[output] = (row, widened)

    def passed(self, inputs: Sequence[Tensor], outputs: Iterable[Tensor]) -> None:
        """Take note of an op on no list: what comes from an island stays of it."""
        island = next((found for tensor in inputs if (found := self._island_of.get(tensor)) is not None), None)
        if island is not None:
            for output in outputs:
                if output.dtype is torch.float32:
                    self._island_of[output] = island


def hints_of(rows: Iterable[Row], unlisted: Iterable[Row], flow: Flow) -> tuple[Hint, ...]:
    """Return what the rows of a trace suggest, by bytes, most first."""
    found = []
    for row in rows:
        if row.exact and row.casts and row.elements_cast > row.work:
            found.append(
                Hint(
                    "casts more than it computes",
                    row.label,
                    f"{row.elements_cast:,} elements cast for {row.work:,} multiply-adds",
                    f"do not cast it: none = [{row.rule!r}]; or keep casts of weights with handle.inference(model)",
                    row.bytes_cast,
                )
            )
    for first, row, count, size in flow.repeats.values():
        found.append(
            Hint(
                "activation cast several times",
                row.label,
                f"{counted(count, 'time')} an activation was cast again after {first.label}, {size:,} bytes",
                "cast it once before both calls, or make both calls in one module's forward with enable_caching",
                size,
            )
        )
    for row, count, size, back in flow.islands.values():
        into = "the program" if back is None else back.label
        found.append(
            Hint(
                "fp32 island",
                row.label,
                f"{counted(count, 'result')} went back to half for {into}; {size:,} bytes for both casts",
                f"list it as fp16 or none if its values allow that; its rule is {row.policy} in {row.origin}",
                size,
            )
        )
    for row in unlisted:
        name = row.op.removeprefix("aten::")
        names = ", ".join(map(repr, spellings(name) or (name,)))
        dtypes = " and ".join(f"{count} {dtype}" for dtype, count in sorted(row.dtypes_in.items()))
        found.append(
            Hint(
                "mixed dtypes on no list",
                row.label,
                f"{counted(row.calls, 'call')} got {dtypes}; torch widened {row.bytes_cast:,} bytes",
                f"list {names} as fp16 or promote, or cast one of the arguments before the call",
                row.bytes_cast,
            )
        )
    return tuple(sorted(found, key=lambda hint: -hint.bytes))
