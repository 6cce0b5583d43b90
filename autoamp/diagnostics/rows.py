"""The rows of a trace, one for each op at each line, and its hints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

from autoamp.diagnostics.call_sites import CallSite
from autoamp.tensors import dtype_name

__all__ = ["COLUMNS", "Hint", "Row"]


@dataclass(slots=True)
class Row:
    """The calls of one op at one line.

    Attributes:
        op: The function's dotted name, or torch's name of an operator on no list.
        policy: The policy's name, ``"unlisted"`` for an op on no list.
        rule: The rule's target, None for an op on no list.
        origin: The list file and line, None for an op on no list.
        site: The module, file and line of the calls.
        calls: The number of calls with casts on, in forward and in recomputations of checkpoints.
        casts: The number of copies of its arguments or results in another floating dtype.
        spared: The number of arguments that needed no copy: the cast was cached, or torch's op reads one dtype and
            computes in the other.
        bytes_cast: The size of the copies in bytes.
        dtypes_in, dtypes_out: The number of floating arguments and results of each dtype.
    """

    op: str
    policy: str
    rule: str | None
    origin: str | None
    site: CallSite
    calls: int = 0
    casts: int = 0
    spared: int = 0
    bytes_cast: int = 0
    dtypes_in: Counter[str] = field(default_factory=Counter)
    dtypes_out: Counter[str] = field(default_factory=Counter)

    def add_call(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Count a call and the dtypes of its tensors."""
        self.calls += 1
        self.dtypes_in.update(dtype_name(tensor.dtype) for tensor in inputs)
        self.dtypes_out.update(dtype_name(tensor.dtype) for tensor in outputs)

    def add_cast(self, size: int) -> None:
        """Count a copy of so many bytes."""
        self.casts += 1
        self.bytes_cast += size

    def to_dict(self) -> dict[str, Any]:
        """Return plain values by the names in `COLUMNS`."""
        return {name: getattr(self.site if name in _OF_SITE else self, name) for name in COLUMNS}

    @property
    def label(self) -> str:
        """The op's last name and its place, for a sentence."""
        op = self.op.rpartition(".")[2]
        inside = f" in {self.site.where}" if self.site.module is not None else ""
        return f"{op}{inside} ({self.site.location or 'no Python frame'})"


_OF_SITE = ("module", "module_class", "root", "location")
COLUMNS = tuple(name for one in fields(Row) for name in (_OF_SITE if one.name == "site" else (one.name,)))
"""The keys of a row in `CastTrace.to_dict`, and the columns of `CastTrace.to_csv`."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Something that a trace suggests.

    Attributes:
        kind: ``"fp32 island"`` or ``"mixed dtypes on no list"``.
        where: The op and its place.
        figure: What was found, with numbers.
        remedy: What to change.
        bytes: The size of the copies in question.
    """

    kind: str
    where: str
    figure: str
    remedy: str
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values by the attributes' names."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.figure}; {self.remedy}"
