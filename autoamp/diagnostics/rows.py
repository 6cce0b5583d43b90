"""What a trace consists of: a row for each op at each place, and hints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from autoamp.diagnostics.call_sites import CallSite

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
        elements_cast: The size of the copies in elements.
        work: The multiply-adds of products (by torch's formulas). For other ops the number of elements of its arguments
            or of its results, whichever is larger.
        exact: Whether every copy was counted. False in ``handle.inference()`` and for cuDNN's recurrent layers, where
            counting would change which kernel runs. There ``casts`` is the number that the policy asks for.
        dtypes_in, dtypes_out: The number of floating arguments and results of each dtype.
        cpu_us, device_us: Total microseconds by torch.profiler, with casts; None if it did not run.
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
    elements_cast: int = 0
    work: int = 0
    exact: bool = True
    dtypes_in: dict[str, int] = field(default_factory=dict)
    dtypes_out: dict[str, int] = field(default_factory=dict)
    cpu_us: float | None = None
    device_us: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values by the names in `COLUMNS`."""
        return {name: getattr(self.site if name in _OF_SITE else self, name) for name in COLUMNS}

    @property
    def label(self) -> str:
        """The op's last name and its place, for a sentence."""
        op = self.op.rpartition(".")[2]
        inside = f" in {self.site.where}" if self.site.module is not None else ""
        return f"{op}{inside} ({self.site.location or 'no Python frame'})"


_OF_SITE = ("module", "module_class", "location")
COLUMNS = tuple(name for one in fields(Row) for name in (_OF_SITE if one.name == "site" else (one.name,)))
"""The keys of a row in `CastTrace.to_dict`, and the columns of `CastTrace.to_csv`."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Something that a trace suggests.

    Attributes:
        kind: ``"casts more than it computes"``, ``"activation cast several times"``, ``"fp32 island"`` or ``"mixed
            dtypes on no list"``.
        where: The op and its place.
        figure: What was found, with numbers.
        remedy: What may be done.
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
