"""The report of a run: its values, a few words for people, and its JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoamp.diagnostics import versions
from autoamp.memory import peak_rss
from autoamp.modules import AUTOCAST


@dataclass(frozen=True)
class Report:
    """What one process of a run did.

    Attributes:
        dtype: The half dtype that the program ran in, whoever cast; ``"float32"`` where it has its own mixed precision,
            and that was off. None where nothing was set up.
        ops: How often functions of the lists were called, by the dtype that they ran in. Like ``casts`` and
            ``functions`` None where nobody counted, as after a program's own ``initialize``.
        casts: How many arguments autoamp cast, by the dtype that they were cast to.
        functions: The calls of each function, by the dtype that it ran in.
        by_program: Whether the program set mixed precision up itself.
        loss_scale: The last scale, of the program's `FP16_Optimizer` or `GradScaler` where it has one; None where
            we scale no loss.
        steps, skipped: Optimizer steps, and how many of these were skips; of the program's `FP16_Optimizer` where it
            has one.
        nonfinite: In how many steps that no loss scale guards the gradients held inf or nan.
        scaling_left_to: What the program scales its losses with, so that this was left to it; else None.
        unused_scaler: Whether the program made an enabled `torch.amp.GradScaler`, and none scaled a loss.
        casts_left_to: What the program computes in half precision with, so that casts ended there; else None.
        unmatched: The entries of the user's lists that had no effect, by name, each with a message.
        own_dtypes: The half dtypes that the program itself computed in, of torch.autocast by regions entered.
        parameters: How many elements the parameters have that ``initialize`` was given, by their dtype; else None.
        masters: Whether optimizers step fp32 masters of those in half precision.
        lists: The files of the lists in force, later ones over earlier ones; empty where no list casts.
        folder: The folder in which the run began.
        memory: The result of `keep_freed_memory`; None if it was not called.
        half_losses: What was lost in half precision without an inf, a row for each.
        lost_params, half_params: How many parameters lost updates, of how many half ones that optimizers step.
        peak_rss: The most bytes of physical memory that the process held; None where that is not Linux.
        repeated: A sentence for each overflow that was logged once, and came in more steps.
        rank, ranks: Which of how many processes under torchrun these numbers are of; None elsewhere.
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
    nonfinite: int = 0
    scaling_left_to: str | None = None
    unused_scaler: bool = False
    casts_left_to: str | None = None
    unmatched: dict[str, str] = field(default_factory=dict)
    own_dtypes: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] | None = None
    masters: bool = False
    rank: int | None = field(default_factory=lambda: _rank_variable("RANK"))
    ranks: int | None = field(default_factory=lambda: _rank_variable("WORLD_SIZE"))
    lists: list[str] = field(default_factory=list)
    folder: str = field(default_factory=os.getcwd)
    half_losses: list[dict[str, Any]] = field(default_factory=list)
    lost_params: int = 0
    half_params: int = 0
    repeated: list[str] = field(default_factory=list)
    memory: str | None = None
    peak_rss: int | None = field(default_factory=peak_rss)
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def is_idle(self) -> bool:
        """Whether this process computed nothing that was counted or in `own_dtypes`, and stepped no optimizer."""
        return not (self.ops or self.own_dtypes or self.steps)

    def summary(self) -> list[str]:
        """Return a line, one for each rule that had no effect, and one for what half precision lost."""
        # A process that only waits for others calls no module that an entry could name.
        unmatched = () if self.casts_left_to is not None or self.is_idle else self.unmatched.values()
        lines = ["; ".join(self._parts()), *(f"no effect: {why}" for why in unmatched), *self.repeated]
        updates = f"updates lost in {self.lost_params} of {self.half_params} parameters"
        kinds = dict.fromkeys(loss["kind"] for loss in self.half_losses)
        if kinds:
            lost = "; ".join(updates if kind == "updates" else f"{kind} rounded" for kind in kinds)
            lines.append(f"{lost} (see docs/diagnostics.md, losses without an inf)")
        return lines

    def _parts(self) -> Iterator[str]:
        """Yield the parts of the first line."""
        if self.dtype is None:
            no_call = self.opt_level in ("O2", "O3") and self.exit_code == 0
            why = ": that level casts what a program gives to amp.initialize(), which was not called; use O1"
            yield f"no casts ({self.opt_level}){why if no_call else ''}"
        else:
            yield from self._casts()
            yield from self._scaling()
        if self.peak_rss is not None:
            freed = "" if self.memory is None else f", freed memory {self.memory}"
            yield f"peak RSS {self.peak_rss / 2**20:,.0f} MiB{freed}"
        if self.dtype is not None and self.lists and self.casts_left_to is None:
            here = Path(self.folder)
            # A list of a parent folder is easily overlooked.
            parents = [str(folder / name) for folder in here.parents for name in ("autoamp.toml", "pyproject.toml")]
            names = (f"{name} of a parent folder" if name in parents else name for name in self.lists)
            yield f"lists {', '.join(name.removeprefix('lists/').removeprefix(f'{here}/') for name in names)}"
        yield f"{self.seconds:.1f} s"

    def _casts(self) -> Iterator[str]:
        """Yield who casts to which dtype, whose numbers these are, the counts, and the dtypes of half models."""
        if self.casts_left_to == AUTOCAST:
            dtypes = " and ".join(self.own_dtypes) or self.dtype
            yield f"{dtypes} on {self.device_type} by the program's own {AUTOCAST}"
        elif self.casts_left_to is not None:
            yield f"casts left to the program, which has {self.casts_left_to}"
        else:
            level = f"{self.opt_level}, set up by the program" if self.by_program else self.opt_level
            yield f"{self.dtype} on {self.device_type} ({level})"
        if (self.ranks or 1) > 1:
            yield f"rank {self.rank} of {self.ranks} alone"
        parameters = self.parameters or {}
        has_halves = not {"float16", "bfloat16"}.isdisjoint(parameters)
        # Models in half precision, and the program's own casts, need none of ours.
        needless = has_halves or self.dtype == "float32" or self.casts_left_to is not None
        for name, counts, before in (("ops", self.ops, ""), ("casts", self.casts, "to ")):
            if self.casts_left_to != AUTOCAST and (counts or (counts is not None and not needless)):
                yield f"{name} {_listed(counts, before)}"
        if has_halves:
            yield f"parameters {_listed(parameters)}, {'with fp32' if self.masters else 'without'} masters"

    def _scaling(self) -> Iterator[str]:
        """Yield the loss scale and the steps."""
        if self.scaling_left_to is not None:
            yield f"loss scaling left to the program's {self.scaling_left_to}"
        if self.unused_scaler:
            yield "the program's torch.amp.GradScaler scaled no loss"
        if self.loss_scale is not None:
            yield f"loss scale {self.loss_scale:g}"
            yield f"{self.skipped} of {self.steps} steps skipped"
        elif self.scaling_left_to is not None:
            yield f"{self.steps} steps"
        elif not (self.nonfinite or self.is_idle):
            yield "losses are not scaled, as no optimizer was seen"
        if self.nonfinite:
            yield f"inf or nan in {self.nonfinite} of {self.steps} steps"


def _rank_variable(name: str) -> int | None:
    """Return a variable that torchrun sets, None elsewhere."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def _listed(counts: Mapping[str, int], before: str = "") -> str:
    return ", ".join(f"{count:,} {before}{name}" for name, count in counts.items()) or "0"
