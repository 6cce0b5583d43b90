"""Searches by runs of the program itself: for the changes that pay, and for the rules that must be fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from autoamp.tools.tuning.model import NOISE, Proposal, Survey, Unit


class Stopped(BaseException):
    """Ends a search before its end: at a signal, or when the budget is spent. The message is the reason.

    Args:
        why: The reason.
        exit_code: The exit code of the command.
    """

    def __init__(self, why: str, exit_code: int = 0) -> None:
        super().__init__(why)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Outcome:
    """How a run of the program went; or its runs with one list, one for each seed, up to the first that failed.

    Attributes:
        metrics: The metric of each run; nan if it reported none, which in fp32 no run does.
        seconds: The median of a step; of the whole program if it has no optimizer; None if steps were too few.
        failed: Why a run failed, None if none did.
    """

    metrics: tuple[float, ...]
    seconds: float | None = None
    failed: str | None = None

    @property
    def metric(self) -> float:
        """The mean of the metrics; nan if one run reported none."""
        return sum(self.metrics) / len(self.metrics)


@dataclass(kw_only=True)
class ProgramSearch:
    """A search by runs of a program. Stopped early, it has the best result so far.

    Attributes:
        run: Runs the program with list entries and a seed, in fp32 for None. It may raise `Stopped`.
        seeds: The seeds of the runs in fp32.
        tolerance: The allowed difference from the metric in fp32, relative.
        fp32, listed, best: The runs in fp32, with the lists as they are, and with ``chosen``; None if there were none.
        chosen: The changes to write.
        stopped: Why the search stopped early, None if it did not.
    """

    run: Callable[[tuple[Proposal, ...] | None, int], Outcome]
    seeds: Sequence[int]
    tolerance: float = 0.02
    fp32: Outcome | None = field(default=None, init=False)
    listed: Outcome | None = field(default=None, init=False)
    best: Outcome | None = field(default=None, init=False)
    chosen: tuple[Proposal, ...] = field(default=(), init=False)
    stopped: Stopped | None = field(default=None, init=False)

    def search(self) -> None:
        """Search until the end, or until `run` raises `Stopped`."""
        try:
            self._search()
        except Stopped as stopped:
            self.stopped = stopped

    def figures(self, metric: str) -> list[str]:
        """Return a line for each list that was run: the metric of each run and the time of a step, or why it failed."""
        lines, best = [], self.best if self.chosen else None
        for name, trial in (("fp32", self.fp32), ("the lists as they are", self.listed), ("this list", best)):
            if trial is not None:
                values = ", ".join(f"{value:.6g}" for value in trial.metrics)
                seconds = "" if trial.seconds is None else f", {1e3 * trial.seconds:.4g} ms a step"
                said = f"{metric} {values}{seconds}" if trial.failed is None else f"failed: {trial.failed}"
                lines.append(f"{name}: {said}")
        return lines

    def _search(self) -> None:
        raise NotImplementedError

    def _trial(self, candidate: tuple[Proposal, ...] | None, seeds: Sequence[int]) -> Outcome:
        import statistics

        outcomes: list[Outcome] = []
        for seed in seeds:
            outcomes.append(self.run(candidate, seed))
            # A list that fails or diverges with one seed needs no other.
            if outcomes[-1].failed is not None or not math.isfinite(outcomes[-1].metric):
                break
        seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
        median = statistics.median(seconds) if len(seconds) == len(outcomes) else None
        return Outcome(tuple(outcome.metric for outcome in outcomes), median, outcomes[-1].failed)


@dataclass(kw_only=True)
class Search(ProgramSearch):
    """Tries proposals on the program: all at once, else one by one, each with all seeds.

    ``chosen`` are the unsafe ops, until runs have confirmed a ``best``. The standard deviation of the metric over seeds
    in fp32 is always allowed.

    Attributes:
        proposals: From `proposals_of`, in the order in which they are tried.
        higher_is_better: Whether a larger metric is better.
        rejected: Changes that were tried and not taken, and why.
        untried: Proposals that were not tried.
    """

    proposals: Sequence[Proposal]
    higher_is_better: bool = False
    rejected: list[tuple[Proposal, str]] = field(default_factory=list, init=False)
    untried: list[Proposal] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.chosen = tuple(one for one in self.proposals if one.kind == "unsafe")
        self.untried = list(self.proposals)

    def _search(self) -> None:
        self.fp32 = self._trial(None, self.seeds)
        self.listed = self._trial((), self.seeds)
        unsafe = self.chosen
        self._why_not(unsafe, None if unsafe else self.listed)
        self.untried = [one for one in self.untried if one not in unsafe]
        candidate = (*unsafe, *self.untried)
        if len(self.untried) > 1 and self._why_not(candidate) is None:
            self.untried = []
        while self.untried:
            why = self._why_not((*self.chosen, self.untried[0]))
            proposal = self.untried.pop(0)
            if why is not None:
                self.rejected.append((proposal, why))

    def _why_not(self, candidate: tuple[Proposal, ...], trial: Outcome | None = None) -> str | None:
        """Run a candidate, and take it if it is good and not slower than the best; else return why it is not taken."""
        import statistics

        trial = trial or self._trial(candidate, self.seeds)
        if trial.failed is not None:
            return f"the program failed: {trial.failed}"
        assert self.fp32 is not None
        fp32 = self.fp32.metric
        spread = statistics.stdev(self.fp32.metrics) if len(self.fp32.metrics) > 1 else 0.0
        allowed = max(self.tolerance * abs(fp32), spread)
        worse = fp32 - trial.metric if self.higher_is_better else trial.metric - fp32
        if not math.isfinite(trial.metric) or worse > allowed:
            return f"the metric is {trial.metric:.6g}, in fp32 {fp32:.6g}, and {allowed:.3g} is allowed"
        best = None if self.best is None else self.best.seconds
        if best is not None and trial.seconds is not None and trial.seconds > best * (1 + NOISE):
            return f"a step takes {1e3 * trial.seconds:.3g} ms, without it {1e3 * best:.3g} ms"
        self.chosen, self.best = candidate, trial
        return None

    def summary(self, survey: Survey, metric: str) -> list[str]:
        """Return the result in lines: figures, whether half precision pays, and the changes that were not taken."""
        lines = [
            f"{survey.dtype} on {survey.device_type}, torch {torch.__version__}, "
            f"seeds {', '.join(map(str, self.seeds))}; surveyed over {survey.steps} steps"
        ]
        lines += self.figures(metric)
        fp32, best = self.fp32, self.best
        if fp32 is not None and self.listed is not None and best is None:
            lines.append("no list that was tried keeps the metric within tolerance")
        elif fp32 is None or best is None or fp32.seconds is None or best.seconds is None:
            lines.append("whether half precision pays on this device is unknown: there were too few runs or steps")
        else:
            ratio = best.seconds / fp32.seconds
            times = f"a step takes {ratio:.2f} times as long as in fp32"
            if ratio <= 1 - NOISE:
                lines.append(f"half precision pays on this device: {times}")
            else:
                lines.append(f"half precision does not pay for this program: {times}, {self._why(survey)}")
                lines.append("for speed, run this program without autoamp on this device")
        if self.chosen and best is None:
            lines.append("these entries come from the survey: no run has confirmed them")
        if survey.untimed:
            lines.append(f"there was no time to measure {survey.untimed} uses of ops; their rules are unchanged")
        if self.stopped is not None:
            lines.append(f"stopped early: {self.stopped}")
        lines += [f"tried and rejected: {one.name} = {one.value}: {why}" for one, why in self.rejected]
        lines += [
            f"not tried: {one.name} = {one.value}: {one.kind}: {one.reason}"
            for one in self.untried
            if one not in self.chosen
        ]
        return lines

    def _why(self, survey: Survey) -> str:
        """Return why half precision does not pay with the chosen list."""
        in_fp32 = {one.name for one in self.chosen if one.value == "fp32" and not one.of_module}
        if in_fp32.issuperset(use.target for use in survey.uses if use.policy == "fp16"):
            return "although this list casts no op to half precision: the rest is autoamp's own time for each call"
        return "as casts and autoamp's own time for each call cost more than half precision saves"


@dataclass(kw_only=True)
class Bisection(ProgramSearch):
    """Searches for the units that must be fp32 by runs of the program.

    A binary search finds each entry: the last unit of the shortest prefix of ``units`` that restores the metric
    together with the culprits found before; so it finds the first of several units that each restore it alone. Each
    culprit takes at most ``ceil(log2(n)) + 1`` runs; four runs come on top. The result was confirmed by a run, even if
    culprits depend on each other.

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

    def _is_restored(self, trial: Outcome) -> bool:
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
