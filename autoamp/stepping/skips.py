"""What became of a step, how many steps an optimizer took, and which of them were skips.

Where the optimizer gets the flag of an overflow on its device, a step is counted before the host knows whether it was a
skip. Reading the number of skips waits for the device.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Protocol, SupportsFloat

from torch import Tensor

from autoamp.scaling import LossScaler, UnreadFlags

__all__ = ["OwnSteps", "SkipOwner", "Skips", "Step", "StepCounts", "StepWatch"]

logger = logging.getLogger(__name__)


class StepWatch:
    """Hears of losses and of steps. Diagnostics override this one, which does nothing."""

    @property
    def wants_flags(self) -> bool:
        """Whether the flag of this step is to be read at once, which waits for the device."""
        return False

    def loss_scaled(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Hear of a loss whose backward pass is about to run, multiplied by a scale.

        Args:
            loss: The loss before it is multiplied, a scalar.
            scale: The scale, which may be known to the device alone.
        """

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


class SkipOwner(Protocol):
    """The owner of an optimizer's guard, which hears of skips."""

    @property
    def watch(self) -> StepWatch:
        """Hears of steps, for diagnostics."""

    def step_skipped(self) -> None:
        """Hear of each skip, as soon as it is known."""


class Step:
    """What became of one call of ``optimizer.step()``, of any optimizer and by whatever rule.

    Attributes:
        unread: Tells of this step, if its guard left the flag of an overflow on the device.
        flag: Not 0 for a skip, if the program's own scaler left it to the optimizer.
    """

    __slots__ = ("_skipped", "flag", "unread")

    def __init__(self) -> None:
        self.unread: UnreadFlags | None = None
        self.flag: Tensor | None = None
        self._skipped: bool | None = None

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped; False while it runs. Waits for the device where that alone knows."""
        if self._skipped is None and self.unread is not None:
            self.unread.catch_up()
        if self._skipped is None and self.flag is not None:
            self._skipped = bool(self.flag)
        return bool(self._skipped)

    @skipped.setter
    def skipped(self, skipped: bool) -> None:
        self._skipped = skipped


class Skips:
    """How many steps one optimizer took, and which were skips. Reading them waits for flags on the device.

    It refers to nothing of the optimizer, so that flags that are still on their way keep no weights alive.

    Args:
        name: Of the optimizer, for the log.
        owner: Hears of each skip.

    Attributes:
        steps: How many times ``step()`` was called, skips included.
        step: The last of these calls.
        name: As given.
        owner: As given.
        explanation: What explains the last skip; None if diagnostics did not record it.
        has_held: Whether any step was taken: at its scale gradients did not overflow.
    """

    def __init__(self, name: str, owner: SkipOwner) -> None:
        self.steps = 0
        self.step = Step()
        self.owner = owner
        self.explanation: Any = None
        self.name = name
        self._total = self._in_a_row = 0
        self.has_held = False
        # Those of the scaler that hears of the last steps later than they are taken.
        self._unread: UnreadFlags | None = None

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

    def begin(self) -> Step:
        """Begin the record of another step."""
        self.steps += 1
        self.step = Step()
        return self.step

    def catch_up(self) -> None:
        """Learn what became of the last steps where that is on the device still; waits for it."""
        if self._unread is not None:
            self._unread.catch_up()

    def wait_by(self, unread: UnreadFlags) -> None:
        """Take note of which flags tell of the next step. Steps are counted in order, so others are waited for."""
        if self._unread is not unread:
            self.catch_up()
            self._unread = unread

    @property
    def in_a_row_known(self) -> int:
        """How many skips in a row are known by now. Waits for nothing."""
        return self._in_a_row

    def count(self, skipped: bool, scaler: LossScaler | None = None, scale: float = 1.0) -> None:
        """Count the last step. Of a skip the scaler is given, and the scale that was too high."""
        self.catch_up()
        self._count(self.step, skipped, scaler, scale)

    def tell(self, step: Step, scaler: LossScaler, scale: float, skipped: bool) -> None:
        """Count a step that was taken earlier."""
        self._count(step, skipped, scaler, scale, late=True)

    def _count(self, step: Step, skipped: bool, scaler: LossScaler | None, scale: float, *, late: bool = False) -> None:
        if skipped or step.flag is None:
            step.skipped = skipped
        self._total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        watch = self.owner.watch
        if not skipped or scaler is None:
            self.has_held = True
            watch.step_known(self, skipped, None, None, late)
            return
        self.owner.step_skipped()
        # A number that is late by now: the scaler hears of this skip before anybody asks it.
        following = None if late else scaler.loss_scale
        self.explanation = watch.step_known(self, skipped, scale, following, late)
        if self._total & (self._total - 1) == 0:
            logger.warning(
                "%s: step skipped, gradients overflowed at loss scale %g, the next is %g (skipped %d, in a row %d)",
                self.name, scale, scaler.loss_scale, self._total, self._in_a_row,
            )  # fmt: skip


@dataclasses.dataclass
class OwnSteps:
    """Steps of optimizers that scale their losses themselves, of all together.

    Attributes:
        scalers: The loss scaler of each optimizer, by what is known of its steps.
    """

    scalers: dict[Skips, LossScaler] = dataclasses.field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many steps there were, skips included."""
        return sum(skips.steps for skips in self.scalers)

    @property
    def skipped(self) -> int:
        """How many of the steps were skips. Waits for the device where only that knows."""
        return sum(skips.total for skips in self.scalers)

    @property
    def losses(self) -> list[LossScaler]:
        """The loss scalers, each once."""
        return list(dict.fromkeys(self.scalers.values()))

    @property
    def loss_scale(self) -> float:
        """The scale of the last optimizer. Waits as `skipped` does."""
        for skips in self.scalers:
            # Scalers hear of skips no earlier than somebody asks.
            skips.catch_up()
        return list(self.scalers.values())[-1].loss_scale


class StepCounts:
    """How many steps the optimizers of a handle took, of all together.

    Args:
        catch_up: Lets all loss scalers hear of steps of which only the device knows whether they were skips.

    Attributes:
        steps: Steps of guarded optimizers, skips included.
        plain: Steps of optimizers whose losses nobody scales.
        guarded: How many optimizers were ever guarded.
        own: What the program's own `FP16_Optimizer` did; None where it has none.
        own_scale: The scale of the program's own `torch.amp.GradScaler`; None where it has none.
        last: The last step of any optimizer.
    """

    def __init__(self, catch_up: Callable[[], None]) -> None:
        self.steps = self.plain = self.guarded = 0
        self.own: OwnSteps | None = None
        self.own_scale: SupportsFloat | None = None
        self.last = Step()
        self._catch_up = catch_up
        self._skipped = 0

    @property
    def all(self) -> int:
        """How many steps there were: skips, those of `FP16_Optimizer` and of losses that nobody scales included."""
        return self.steps + self.plain + (0 if self.own is None else self.own.steps)

    @property
    def skipped(self) -> int:
        """How many steps were skipped, of all optimizers together. Waits for the device where only that knows."""
        self._catch_up()
        return self._skipped

    @property
    def all_skipped(self) -> int:
        """How many steps were skipped, those of `FP16_Optimizer` included. Waits as `skipped` does."""
        return self.skipped + (0 if self.own is None else self.own.skipped)

    def loss_scale(self, ours: float) -> float:
        """Return the scale that losses have: that of the program's own scaler, if it has one, else ours."""
        if self.own is not None:
            return self.own.loss_scale
        return ours if self.own_scale is None else float(self.own_scale)

    def step_begins(self, step: Step) -> None:
        """Count a step of a guarded optimizer."""
        self.steps += 1
        self.last = step

    def add_skip(self) -> None:
        """Count a skip."""
        self._skipped += 1

    def reset(self, skipped: int = 0) -> None:
        """Count steps from 0 on, and skips from a number on."""
        self._catch_up()
        self.steps, self._skipped = 0, skipped
