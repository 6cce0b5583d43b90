"""The report of a run: what one process did, in a few words for people."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

from autoamp.core import AUTOCAST


class Report(SimpleNamespace):
    """What one process of a run did. The attributes are the values of ``--report``; `Run.report` says what they are."""

    @property
    def is_idle(self) -> bool:
        """Whether this process computed nothing that was counted or in `own_dtypes`, and stepped no optimizer."""
        return not (self.ops or self.own_dtypes or self.steps)

    @property
    def only_waited(self) -> bool:
        """Whether it is idle and has started processes, whose casts and steps are not counted."""
        # Python imports one of these modules when it starts the first process.
        return self.is_idle and any(name.startswith("multiprocessing.popen_") for name in sys.modules)

    @property
    def is_off(self) -> bool:
        """Whether the program turned casts off before this process computed anything."""
        return self.turned_off and self.is_idle

    def summary(self) -> list[str]:
        """Return a line, one for each rule that had no effect, and one for what half precision lost."""
        # A process that only waits for others calls no module that an entry could name.
        has_no_calls = self.casts_left_to is not None or self.only_waited or self.is_off
        unmatched = () if has_no_calls else self.unmatched.values()
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
            why = ""
            if self.turned_off:
                why = ": turned off by the program"
            elif self.opt_level in ("O2", "O3") and self.exit_code == 0 and not self.only_waited:
                why = ": that level casts what a program gives to amp.initialize(), which was not called; use O1"
            yield f"no casts ({self.opt_level}){why}"
        else:
            yield from self._casts()
            yield from self._scaling()
        if self.only_waited:
            yield "the processes that it started are not counted"
        if self.peak_rss is not None:
            freed = "" if self.memory is None else f", freed memory {self.memory}"
            yield f"peak RSS {self.peak_rss / 2**20:,.0f} MiB{freed}"
        if self.dtype is not None and self.lists and self.casts_left_to is None:
            # A list of a parent folder is easily overlooked.
            files = ("autoamp.toml", "pyproject.toml")
            above = [str(folder / name) for folder in Path(self.folder).parents for name in files]
            names = (f"{name} of a parent folder" if name in above else name for name in self.lists)
            yield f"lists {', '.join(name.removeprefix('lists/').removeprefix(f'{self.folder}/') for name in names)}"
        yield f"{self.seconds:.1f} s"

    def _casts(self) -> Iterator[str]:
        """Yield who casts to which dtype, whose numbers these are, the counts, and the dtypes of half models."""
        if self.casts_left_to == AUTOCAST:
            dtypes = " and ".join(self.own_dtypes) or self.dtype
            yield f"{dtypes} on {self.device_type} by the program's own {AUTOCAST}"
        elif self.casts_left_to is not None:
            yield f"casts left to the program, which has {self.casts_left_to}"
        else:
            did = "turned off" if self.is_off else "set up" if self.by_program else None
            level = self.opt_level if did is None else f"{self.opt_level}, {did} by the program"
            yield f"{self.dtype} on {self.device_type} ({level})"
        if (self.ranks or 1) > 1:
            yield f"rank {self.rank} of {self.ranks} alone"
        parameters = self.parameters or {}
        has_halves = not {"float16", "bfloat16"}.isdisjoint(parameters)
        # Models in half precision, and the program's own casts, need none of ours.
        needless = has_halves or self.dtype == "float32" or self.casts_left_to is not None
        for name, counts, before in (("ops", self.ops, ""), ("casts", self.casts, "to ")):
            if self.casts_left_to != AUTOCAST and (counts or not needless):
                why = self.no_ops if name == "ops" and self.steps and not counts else None
                yield f"{name} {_listed(counts, before)}" + (f" ({why.replace(f'{self.folder}/', '')})" if why else "")
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
        elif not (self.nonfinite or self.only_waited or self.is_off):
            yield "losses are not scaled, as no optimizer was seen"
        if self.nonfinite:
            yield f"inf or nan in {self.nonfinite} of {self.steps} steps"


def _listed(counts: Mapping[str, int], before: str = "") -> str:
    return ", ".join(f"{count:,} {before}{name}" for name, count in counts.items()) or "0"
