"""The rows of a trace, one for each op at each line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from autoamp.diagnostics.call_sites import CallSite
from autoamp.tensors import dtype_name

__all__ = ["Row"]


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
        """Return plain values by the attributes' names; those of the site are on the same level."""
        of_site = {name: getattr(self.site, name) for name in ("module", "module_class", "root", "location")}
        return {**of_site, **{one.name: getattr(self, one.name) for one in fields(self) if one.name != "site"}}
