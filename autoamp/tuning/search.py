"""The confirming runs: the program itself, with several seeds, for as long as the budget lasts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autoamp.tuning.model import NOISE, Proposal


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
    """How one run of the program went.

    Attributes:
        metric: Its metric, None if it reported none; in fp32 always finite.
        seconds: The median of a step; of the whole program if it has no optimizer; None if steps were too few.
        failed: Why it failed; None if it ended well.
    """

    metric: float | None = None
    seconds: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Trial:
    """The runs of one list, one for each seed, up to the first that failed.

    Attributes:
        failed: Why a run failed, None if none did.
        metrics: The metric of each run; nan if it reported none.
        seconds: The median time, None if a run has none.
    """

    failed: str | None
    metrics: tuple[float, ...]
    seconds: float | None

    @property
    def metric(self) -> float:
        """The mean of the metrics; nan if one run reported none."""
        return statistics.fmean(self.metrics)


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
    fp32: Trial | None = field(default=None, init=False)
    listed: Trial | None = field(default=None, init=False)
    best: Trial | None = field(default=None, init=False)
    chosen: tuple[Proposal, ...] = field(default=(), init=False)
    stopped: Stopped | None = field(default=None, init=False)

    def search(self) -> None:
        """Search until the end, or until `run` raises `Stopped`."""
        try:
            self._search()
        except Stopped as stopped:
            self.stopped = stopped

    def _search(self) -> None:
        raise NotImplementedError

    def _trial(self, candidate: tuple[Proposal, ...] | None, seeds: Sequence[int]) -> Trial:
        outcomes: list[Outcome] = []
        for seed in seeds:
            outcomes.append(self.run(candidate, seed))
            # A list that fails or diverges with one seed needs no other.
            if outcomes[-1].failed is not None or not math.isfinite(outcomes[-1].metric or 0.0):
                break
        metrics = tuple(math.nan if outcome.metric is None else outcome.metric for outcome in outcomes)
        seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
        median = statistics.median(seconds) if len(seconds) == len(outcomes) else None
        return Trial(outcomes[-1].failed, metrics, median)


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

    def _why_not(self, candidate: tuple[Proposal, ...], trial: Trial | None = None) -> str | None:
        """Run a candidate, and take it if it is good and not slower than the best; else return why it is not taken."""
        trial = trial or self._trial(candidate, self.seeds)
        why = self._differs(trial) or self._slower(trial)
        if why is None:
            self.chosen, self.best = candidate, trial
        return why

    def _differs(self, trial: Trial) -> str | None:
        """Return why the metric of a trial is not within tolerance of that in fp32, None if it is."""
        if trial.failed is not None:
            return f"the program failed: {trial.failed}"
        assert self.fp32 is not None
        fp32 = self.fp32.metric
        spread = statistics.stdev(self.fp32.metrics) if len(self.fp32.metrics) > 1 else 0.0
        allowed = max(self.tolerance * abs(fp32), spread)
        worse = fp32 - trial.metric if self.higher_is_better else trial.metric - fp32
        if math.isfinite(trial.metric) and worse <= allowed:
            return None
        return f"the metric is {trial.metric:.6g}, in fp32 {fp32:.6g}, and {allowed:.3g} is allowed"

    def _slower(self, trial: Trial) -> str | None:
        """Return that a trial is slower than the best so far, None if it is not."""
        best = None if self.best is None else self.best.seconds
        if best is None or trial.seconds is None or trial.seconds <= best * (1 + NOISE):
            return None
        return f"a step takes {1e3 * trial.seconds:.3g} ms, without it {1e3 * best:.3g} ms"
