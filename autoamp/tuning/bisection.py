"""Group testing: find the rules that must be fp32 to restore a program's metric."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autoamp.diagnostics import spellings
from autoamp.tuning.model import Proposal, Survey, Use
from autoamp.tuning.search import ProgramSearch, Trial

Unit: TypeAlias = tuple[Proposal, ...]
"""The list entries that put one module, or one op under all of its names, into fp32."""


def units_of(survey: Survey) -> tuple[Unit, ...]:
    """Return the candidates for fp32: the innermost modules that a program called, and ops called outside of these.

    A module is named by its class if it is the only one of that class, else by its path. Ops that the lists already
    run in fp32 are left out, and unlisted ops that are exact in half precision, such as views.
    """
    paths: defaultdict[str, set[str]] = defaultdict(set)
    for use in survey.uses:
        if use.module is not None and use.module_class is not None:
            paths[use.module_class].add(use.module)
    units: defaultdict[tuple[tuple[str, ...], bool], list[str]] = defaultdict(list)
    for use in survey.uses:
        exact = use.policy == "unlisted" and not use.overflow and use.error == 0.0
        if use.policy not in ("fp32", "banned") and not exact:
            units[_entries(use, paths)].append(f"{use.op} at {use.location}" if use.location else use.op)
    return tuple(
        tuple(Proposal(name, "fp32", "culprit", _some(calls), of_module=of_module) for name in names)
        for (names, of_module), calls in units.items()
    )


def _entries(use: Use, paths: dict[str, set[str]]) -> tuple[tuple[str, ...], bool]:
    """Return the entries that put a use into fp32, and whether they name a module."""
    if use.module is not None and use.module_class is not None and len(paths[use.module_class]) == 1:
        return (use.module_class,), True
    if use.module:
        return (use.module,), True
    # The survey does not know by which of its names an unlisted op was called.
    return (use.policy == "unlisted" and spellings(use.target)) or (use.target,), False


def _some(calls: Sequence[str]) -> str:
    different = list(dict.fromkeys(calls))
    return ", ".join(different[:3]) + (", ..." if len(different) > 3 else "")


@dataclass(kw_only=True)
class Bisection(ProgramSearch):
    """Searches for the units that must be fp32 by runs of the program.

    A binary search finds each culprit: the last unit of the shortest prefix of ``units`` that restores the metric
    together with the culprits found before. Each culprit takes at most ``ceil(log2(n)) + 1`` runs; four runs come on
    top. The result was confirmed by a run, even if culprits depend on each other.

    ``chosen`` are the entries of the fewest units that restored the metric in a run. All runs have the first of the
    seeds; in fp32 the program runs with each, and the difference between these runs is always allowed.

    Attributes:
        units: From `units_of`.
    """

    units: Sequence[Unit]

    @property
    def allowed(self) -> float:
        """The allowed difference from the metric of the first run in fp32."""
        assert self.fp32 is not None
        first, *others = self.fp32.metrics
        return max([self.tolerance * abs(first), *(abs(value - first) for value in others)])

    @property
    def is_wrong(self) -> bool:
        """Whether the metric with the lists as they are is known to differ from that in fp32."""
        return self.listed is not None and not self._is_restored(self.listed)

    def _is_restored(self, trial: Trial) -> bool:
        """Whether a run did not fail and has the metric of fp32."""
        assert self.fp32 is not None
        return trial.failed is None and abs(trial.metric - self.fp32.metrics[0]) <= self.allowed

    def _search(self) -> None:
        self.fp32 = self._trial(None, self.seeds)
        self.listed = self._trial((), self.seeds[:1])
        if not self.is_wrong or not self.units or not self._restores(self.units):
            return
        found: tuple[Unit, ...] = ()
        # A run has shown that these and the first `high` units restore the metric.
        high = len(self.units)
        while high and not (found and self._restores(found)):
            low = 0
            while high - low > 1:
                middle = (low + high) // 2
                if self._restores((*found, *self.units[:middle])):
                    high = middle
                else:
                    low = middle
            high -= 1
            found = (*found, self.units[high])

    def _restores(self, units: Sequence[Unit]) -> bool:
        """Run the program with these units in fp32, and return whether that restores the metric."""
        entries = {one.name: one for unit in units for one in unit}
        trial = self._trial(tuple(entries.values()), self.seeds[:1])
        if not self._is_restored(trial):
            return False
        self.best, self.chosen = trial, tuple(entries.values())
        return True
