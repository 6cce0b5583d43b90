"""Group testing: find the rules that must be fp32 to restore a program's metric."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from autoamp.diagnostics import spellings
from autoamp.tuning.model import Proposal, Survey, Use
from autoamp.tuning.search import Outcome, ProgramSearch

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


@dataclass
class Bisection(ProgramSearch):
    """Searches for the units that must be fp32 by runs of the program.

    A binary search finds each culprit: the last unit of the shortest prefix of ``units`` that restores the metric
    together with the culprits found before. Each culprit takes at most ``ceil(log2(n)) + 1`` runs; four runs come on
    top. The result was confirmed by a run, even if culprits depend on each other.

    Attributes:
        units: From `units_of`.
        seed: The seed of all runs; the second run in fp32 has the next one.
        tolerance: The allowed relative difference from the metric in fp32. The difference between the two runs in fp32
            is always allowed.
        fp32: The metrics of the runs in fp32.
        half: The run with the lists as they are.
        restored: The run with the culprits in fp32; before the search ends, the run with the fewest units that restores
            the metric. None if there is no such run.
        culprits: The units of that run.
    """

    units: Sequence[Unit]
    seed: int = 0
    tolerance: float = 0.02
    fp32: tuple[float, ...] = field(default=(), init=False)
    half: Outcome | None = field(default=None, init=False)
    restored: Outcome | None = field(default=None, init=False)
    culprits: tuple[Unit, ...] = field(default=(), init=False)

    @property
    def allowed(self) -> float:
        """The allowed difference from the metric of the first run in fp32."""
        return max(self.tolerance * abs(self.fp32[0]), *(abs(value - self.fp32[0]) for value in self.fp32))

    def is_restored(self, outcome: Outcome) -> bool:
        """Whether a run did not fail and has the metric of fp32."""
        if outcome.failed is not None or outcome.metric is None:
            return False
        return abs(outcome.metric - self.fp32[0]) <= self.allowed

    def _search(self) -> None:
        for seed in (self.seed, self.seed + 1):
            metric = self.run(None, seed).metric
            assert metric is not None
            self.fp32 = (*self.fp32, metric)
        self.half = self.run((), self.seed)
        if self.is_restored(self.half) or not self.units or not self._restores(self.units):
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
        outcome = self.run(tuple(entries.values()), self.seed)
        if self.is_restored(outcome):
            self.restored, self.culprits = outcome, tuple(units)
            return True
        return False
