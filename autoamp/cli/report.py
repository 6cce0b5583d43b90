"""The report of a run: its values, a line for people, and its JSON."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

__all__ = ["Report", "versions"]


def versions() -> dict[str, str]:
    """Return the versions of what takes part: autoamp, torch and Python."""
    ours = str(getattr(sys.modules["autoamp"], "__version__", ""))
    return {"autoamp": ours, "torch": torch.__version__, "python": platform.python_version()}


@dataclass(frozen=True)
class Report:
    """How a run went. Counts are of one process; ``dtype`` is None where nothing was cast.

    Attributes:
        ops: How often functions of the lists were called, by the dtype that they ran in. Like ``casts`` and
            ``functions`` None where nobody counted, as after a program's own ``initialize``.
        casts: How many arguments were cast, by the dtype that they were cast to.
        functions: The calls of each function, by the dtype that it ran in.
        by_program: Whether the program set mixed precision up itself.
        loss_scale: The last scale, of the program's `FP16_Optimizer` where it has one; None where we scale no loss.
        steps, skipped: Optimizer steps, and how many of these were skips; of the program's `FP16_Optimizer` where it
            has one.
        scaling_left_to: What the program scales its losses with, so that this was left to it; else None.
        casts_left_to: What the program computes in half precision with, so that casts ended there; else None.
        waited_for: The call in the program's source that casts waited for to the end; else None.
    """

    program: list[str]
    opt_level: str
    device_type: str | None
    dtype: str | None
    ops: dict[str, int] | None
    casts: dict[str, int] | None
    functions: dict[str, dict[str, int]] | None
    loss_scale: float | None
    steps: int
    skipped: int
    seconds: float
    exit_code: int
    by_program: bool
    scaling_left_to: str | None = None
    casts_left_to: str | None = None
    waited_for: str | None = None
    versions: dict[str, str] = field(default_factory=versions)

    def summary(self) -> str:
        """Return one line for people."""
        if self.dtype is None:
            why = f"({self.opt_level})"
            if self.opt_level in ("O2", "O3") and self.exit_code == 0:
                why += ": that level casts what a program gives to amp.initialize(), which was not called; use O1"
            return f"autoamp: no casts {why}; {self.seconds:.1f} s"
        if self.waited_for is not None:
            why = f"the program's source calls {self.waited_for}(), which was not called, and no optimizer stepped"
            return f"autoamp: no casts ({self.opt_level}): {why}; {self.seconds:.1f} s"
        level = f"{self.opt_level}, set up by the program" if self.by_program else self.opt_level
        parts = [
            f"{self.dtype} on {self.device_type} ({level})"
            if self.casts_left_to is None
            else f"casts left to the program, which has {self.casts_left_to}",
            *([] if self.ops is None else [f"ops {_listed(self.ops)}"]),
            *([] if self.casts is None else [f"casts {_listed(self.casts, 'to ')}"]),
            self._scaling(),
            f"{self.seconds:.1f} s",
        ]
        return "autoamp: " + "; ".join(parts)

    def _scaling(self) -> str:
        """Return what became of the losses' scale."""
        left = "" if self.scaling_left_to is None else f"loss scaling left to the program's {self.scaling_left_to}"
        if self.loss_scale is None:
            return left or "losses are not scaled, as no optimizer was seen"
        scale = f"loss scale {self.loss_scale:g}; {self.skipped} of {self.steps} steps skipped"
        return f"{left}: {scale}" if left else scale

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values by the attributes' names."""
        return asdict(self)


def _listed(counts: Mapping[str, int], before: str = "") -> str:
    return ", ".join(f"{count:,} {before}{name}" for name, count in counts.items()) or "0"
