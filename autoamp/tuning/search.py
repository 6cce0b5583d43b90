"""The confirming runs: the program itself, with several seeds, for as long as the budget lasts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autoamp.tuning.model import NOISE, SLOWER, Proposal

__all__ = ["INTERRUPTED", "OutOfBudget", "Outcome", "Search", "SearchResult", "Trial"]

INTERRUPTED = "it was interrupted"
"""What `SearchResult.stopped` says after a KeyboardInterrupt without a message; one with a message says that."""

Candidate = tuple[Proposal, ...] | None
"""The changes that a run is made with; None for fp32."""


class OutOfBudget(Exception):
    """There is no time for another run."""


@dataclass(frozen=True)
class Outcome:
    """How one run of the program went.

    Attributes:
        metric: Its metric, None where it told none.
        seconds: Of a step, the median; of the whole program where it has no optimizer; None where steps were too few.
        peak_bytes: The most memory it held, None where unknown.
        failed: Why it failed; None where it ended well.
    """

    metric: float | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Trial:
    """The runs of one candidate, one for each seed, up to the first that failed."""

    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> str | None:
        """Why a run failed, None where none did."""
        return next((outcome.failed for outcome in self.outcomes if outcome.failed is not None), None)

    @property
    def metrics(self) -> tuple[float, ...]:
        """The metric of each run; nan where it told none."""
        return tuple(math.nan if outcome.metric is None else outcome.metric for outcome in self.outcomes)

    @property
    def metric(self) -> float:
        """Their mean; nan where one run told none."""
        return statistics.fmean(self.metrics)

    @property
    def seconds(self) -> float | None:
        """The median time, None where a run has none."""
        found = [outcome.seconds for outcome in self.outcomes if outcome.seconds is not None]
        return statistics.median(found) if len(found) == len(self.outcomes) else None

    @property
    def peak_bytes(self) -> int | None:
        """The most memory of a run, None where it is unknown."""
        return max((outcome.peak_bytes for outcome in self.outcomes if outcome.peak_bytes is not None), default=None)


@dataclass
class SearchResult:
    """What a search found; it is filled as the search goes on, so that it is of use whenever that stops.

    Attributes:
        fp32, listed, best: The runs in fp32, with the lists as they are, and with what was ``chosen``; None where
            there was no time for them.
        chosen: The changes to write.
        confirmed: Whether runs have confirmed them. Else they are the unsafe ops of the cost model.
        rejected: Changes that were tried and not taken, and why.
        untried: Those that were not tried.
        stopped: Why the search stopped before its end, None where it did not.
    """

    fp32: Trial | None = None
    listed: Trial | None = None
    best: Trial | None = None
    chosen: tuple[Proposal, ...] = ()
    confirmed: bool = False
    rejected: list[tuple[Proposal, str]] = field(default_factory=list)
    untried: tuple[Proposal, ...] = ()
    stopped: str | None = None


class Search:
    """Tries proposals on the program, all that are sure at once, else one by one.

    Args:
        run: Runs the program with a candidate and a seed. `OutOfBudget` and KeyboardInterrupt stop the search.
        proposals: By `proposals_of`, in the order in which they are tried.
        seeds: One run of each candidate is made with each.
        tolerance: How much worse than in fp32 the metric may be, as a part of it; the standard deviation over seeds in
            fp32 is allowed at least.
        higher_is_better: Whether the metric is to be large.
    """

    def __init__(
        self,
        run: Callable[[Candidate, int], Outcome],
        proposals: Sequence[Proposal],
        seeds: Sequence[int],
        *,
        tolerance: float = 0.02,
        higher_is_better: bool = False,
    ) -> None:
        self._run = run
        self._proposals = tuple(proposals)
        self._seeds = tuple(seeds)
        self._tolerance = tolerance
        self._higher = higher_is_better
        self._trials: dict[tuple[tuple[str, str], ...] | None, Trial] = {}
        self.result = SearchResult(chosen=self._unsafe, untried=self._proposals)

    @property
    def _unsafe(self) -> tuple[Proposal, ...]:
        return tuple(one for one in self._proposals if one.kind == "unsafe")

    def search(self) -> SearchResult:
        """Try until the end, or until there is no time; return the best so far."""
        try:
            self._search()
        except OutOfBudget:
            self.result.stopped = "the budget was spent"
        except KeyboardInterrupt as error:
            self.result.stopped = str(error) or INTERRUPTED
        return self.result

    def _search(self) -> None:
        result = self.result
        result.fp32 = self._trial(None)
        if result.fp32.failed or math.isnan(result.fp32.metric):
            return
        result.listed = self._trial(())
        if self._unsafe:
            self._try(self._unsafe, self._unsafe)
        elif self._within(result.listed) is None:
            self._take((), result.listed)
        others = [one for one in self._proposals if one.kind != "unsafe"]
        firm = tuple(one for one in others if one.firm)
        pending = [one for one in others if one not in firm]
        if firm and not self._try((*self._unsafe, *firm), firm):
            pending = [*firm, *pending]
        for proposal in pending:
            for value in (proposal.value, *proposal.otherwise):
                one = proposal.as_value(value)
                if self._try((*result.chosen, one), (proposal,)):
                    break

    def _try(self, candidate: tuple[Proposal, ...], new: tuple[Proposal, ...]) -> bool:
        """Make the runs of a candidate; take it, and return True, where it is good and not slower than the best.

        Of several that are not taken each is tried by itself later, but for unsafe ops, which stay.
        """
        trial = self._trial(candidate)
        why = self._within(trial) or self._slower(trial, new)
        if why is None:
            self._take(candidate, trial)
        elif len(new) == 1 and new[0].kind != "unsafe" and all(one != candidate[-1] for one, _ in self.result.rejected):
            self.result.rejected.append((candidate[-1], why))
        if why is None or len(new) == 1 or new == self._unsafe:
            names = {one.name for one in new}
            self.result.untried = tuple(one for one in self.result.untried if one.name not in names)
        return why is None

    def _take(self, candidate: tuple[Proposal, ...], trial: Trial) -> None:
        self.result.chosen, self.result.best, self.result.confirmed = candidate, trial, True

    def _trial(self, candidate: Candidate) -> Trial:
        key = None if candidate is None else tuple((one.name, one.value) for one in candidate)
        if key not in self._trials:
            outcomes: list[Outcome] = []
            for seed in self._seeds:
                outcomes.append(self._run(candidate, seed))
                # What has failed, or diverged, with one seed needs no other.
                if outcomes[-1].failed is not None or not math.isfinite(outcomes[-1].metric or 0.0):
                    break
            self._trials[key] = Trial(tuple(outcomes))
        return self._trials[key]

    def _within(self, trial: Trial) -> str | None:
        """Return why the metric of a trial is not within tolerance of that in fp32, None where it is."""
        if trial.failed is not None:
            return f"the program failed: {trial.failed}"
        fp32 = self.result.fp32
        assert fp32 is not None
        spread = statistics.stdev(fp32.metrics) if len(fp32.metrics) > 1 else 0.0
        allowed = max(self._tolerance * abs(fp32.metric), spread)
        worse = fp32.metric - trial.metric if self._higher else trial.metric - fp32.metric
        # Not finite is never within.
        if math.isfinite(trial.metric) and worse <= allowed:
            return None
        return f"the metric is {trial.metric:.6g}, in fp32 {fp32.metric:.6g}, and {allowed:.3g} is allowed"

    def _slower(self, trial: Trial, new: tuple[Proposal, ...]) -> str | None:
        """Return that a trial is slower than the best so far, None where it is not."""
        best = self.result.best
        if best is None or best.seconds is None or trial.seconds is None or any(p.kind == "unsafe" for p in new):
            return None
        limit = SLOWER if any(one.kind == "memory" for one in new) else 1 + NOISE
        if trial.seconds <= best.seconds * limit:
            return None
        return f"a step takes {1e3 * trial.seconds:.3g} ms, without it {1e3 * best.seconds:.3g} ms"
