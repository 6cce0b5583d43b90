"""How many steps an optimizer took, and which of them were skips.

Where the optimizer gets the flag of an overflow on its device, a step is counted before anybody knows whether it was a
skip. Whoever asks waits for the device.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from typing import Any, Protocol, SupportsFloat

from torch import Tensor

from autoamp.scaling import LateFlags, LossScaler, Number, Scale

__all__ = ["Rehearsing", "Skips", "StepWatch"]

logger = logging.getLogger(__name__)


class StepWatch(Protocol):
    """What looks on as losses are scaled and optimizers step. It raises nothing and changes nothing."""

    wants_flags: bool
    """Whether it wants to hear of skips at once, though the device alone knows of them as yet."""

    def loss_scaled(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Hear of a loss whose backward pass is about to run, multiplied by a scale."""

    def step_begins(self) -> None:
        """Hear that an optimizer is called."""

    def step_known(self, skips: Skips, skipped: bool, scale: float | None, next_scale: float | None, late: bool) -> Any:
        """Hear what became of a step, and return what explains it, if it was a skip.

        Args:
            skips: Of the optimizer.
            skipped: Whether the step was a skip.
            scale: The loss scale of a skip; nan where it is not known.
            next_scale: The one after it.
            late: Whether it was taken earlier, and others may have been since.
        """


class Watched(Protocol):
    """Steps of optimizers at which something may look on.

    Attributes:
        watch: What does; None where nothing does.
    """

    watch: StepWatch | None


class Rehearsing(Protocol):
    """What a step of the program is rehearsed by, which changes nothing."""

    def scaled(self, loss: Tensor) -> contextlib.AbstractContextManager[Tensor]:
        """Scale a loss within a ``with`` statement."""

    def backward(self, loss: Tensor) -> None:
        """Scale a loss and run its backward pass."""

    def step_reached(self) -> BaseException:
        """Return what is to be raised where an optimizer is called."""


class Skips:
    """How many steps one optimizer took, and which were skips. Whoever reads it waits for what only the device knows.

    It refers to nothing of the optimizer, so that flags that are still on their way keep no weights alive.

    Args:
        name: Of the optimizer, for the log.
        on_skip: Called once for each skip, as soon as it is known.

    Attributes:
        steps: How many times ``step()`` was called, skips included.
        at_lowest: How many skips in a row are known by now that overflowed at the lowest scale that their scaler has.
        watched: Has what looks on at these steps, if anything does.
        explanation: What explains the last skip, as far as anybody looked on.
    """

    def __init__(self, name: str, on_skip: Callable[[], None]) -> None:
        self.steps = self.at_lowest = 0
        self.watched: Watched = _NotWatched()
        self.explanation: Any = None
        self._name = name
        self._on_skip = on_skip
        self._total = self._in_a_row = 0
        self._last = self._has_news = False
        # Those of the scaler that hears of the last steps later than they are taken.
        self._late: LateFlags | None = None

    @property
    def total(self) -> int:
        """How many steps were skips."""
        self.catch_up()
        return self._total

    @property
    def in_a_row(self) -> int:
        """How many skips came since the last step that was taken."""
        self.catch_up()
        return self._in_a_row

    @in_a_row.setter
    def in_a_row(self, count: int) -> None:
        self.catch_up()
        self._in_a_row, self.at_lowest = count, min(count, self.at_lowest)

    @property
    def last(self) -> bool:
        """Whether the last step was a skip."""
        self.catch_up()
        return self._last

    @last.setter
    def last(self, skipped: bool) -> None:
        if self._late is not None:
            self._late.catch_up()
        self._last = skipped

    def catch_up(self) -> None:
        """Learn what became of the last steps where that is on the device still; waits for it."""
        if self._late is not None:
            self._late.catch_up()

    def wait_by(self, late: LateFlags) -> None:
        """Take note of which flags tell of the next step. Steps are counted in order, so others are waited for."""
        if self._late is not late:
            self.catch_up()
            self._late = late

    def news(self) -> int:
        """Return how many skips in a row are known, if the last of them came to be known since this was asked."""
        has_news, self._has_news = self._has_news, False
        return self._in_a_row if has_news else 0

    def count(self, skipped: bool, scaler: LossScaler | None = None, scale: Scale = 1.0) -> None:
        """Count a step. Of a skip the scaler is given, and the scale that was too high."""
        if self._late is not None:
            self._late.catch_up()
        self._count(skipped, scaler, scale)

    def tell(self, scaler: LossScaler, scale: Number, skipped: bool) -> None:
        """Count a step that was taken earlier."""
        self._has_news = skipped
        self._count(skipped, scaler, scale, late=True)

    def _count(self, skipped: bool, scaler: LossScaler | None, scale: Scale | Number, *, late: bool = False) -> None:
        self._last = skipped
        self._total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        watch = self.watched.watch
        if not skipped or scaler is None:
            self.at_lowest = 0
            if watch is not None:
                watch.step_known(self, skipped, None, None, late)
            return
        self._on_skip()
        self.at_lowest = self.at_lowest + 1 if scaler.is_lowest(_value_of(scale)) else 0
        if watch is not None:
            # A number that is late by now: the scaler hears of this skip before anybody asks it.
            following = None if late else scaler.loss_scale
            self.explanation = watch.step_known(self, skipped, _value_of(scale), following, late)
        if self._total & (self._total - 1) == 0:
            logger.warning(
                "%s: step skipped, gradients overflowed at loss scale %s, the next is %g (skipped %d, in a row %d)",
                self._name, format(scale, "g"), scaler.loss_scale, self._total, self._in_a_row,
            )  # fmt: skip


def _value_of(scale: Scale | Number) -> float:
    """Return a scale as a number, nan where the device has not told of it."""
    shown = format(scale, ".17g")
    return math.nan if shown == "unknown" else float(shown)


class _NotWatched:
    """Stands for steps at which nothing looks on."""

    watch: StepWatch | None = None
