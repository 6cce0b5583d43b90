"""How many steps an optimizer took, and which of them were skips.

Where the optimizer gets the flag of an overflow on its device, a step is counted before anybody knows whether it was a
skip. Whoever asks waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from autoamp.scaling import LateFlags, LossScaler, Number, Scale

__all__ = ["Skips"]

logger = logging.getLogger(__name__)


class Skips:
    """How many steps one optimizer took, and which were skips. Whoever reads it waits for what only the device knows.

    It refers to nothing of the optimizer, so that flags that are still on their way keep no weights alive.

    Args:
        name: Of the optimizer, for the log.
        on_skip: Called once for each skip, as soon as it is known.

    Attributes:
        steps: How many times ``step()`` was called, skips included.
    """

    def __init__(self, name: str, on_skip: Callable[[], None]) -> None:
        self.steps = 0
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
        self._in_a_row = count

    @property
    def last(self) -> bool:
        """Whether the last step was a skip."""
        self.catch_up()
        return self._last

    @last.setter
    def last(self, skipped: bool) -> None:
        self.catch_up()
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
        self.catch_up()
        self._count(skipped, scaler, scale)

    def tell(self, scaler: LossScaler, scale: Number, skipped: bool) -> None:
        """Count a step that was taken earlier."""
        self._has_news = skipped
        self._count(skipped, scaler, scale)

    def _count(self, skipped: bool, scaler: LossScaler | None, scale: Scale | Number) -> None:
        self._last = skipped
        self._total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if not skipped or scaler is None:
            return
        self._on_skip()
        if self._total & (self._total - 1) == 0:
            logger.warning(
                "%s: step skipped, gradients overflowed at loss scale %s, the next is %g (skipped %d, in a row %d)",
                self._name, format(scale, "g"), scaler.loss_scale, self._total, self._in_a_row,
            )  # fmt: skip
