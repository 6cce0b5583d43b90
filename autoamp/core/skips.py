"""What became of a step, how many steps an optimizer took, and which of them were skips.

Where the optimizer gets the flag of an overflow on its device, a step is counted before the host knows whether it was a
skip. Reading the number of skips waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, SupportsFloat, TypeVar

from torch import Tensor

from autoamp.core.casts import CastState
from autoamp.core.current_step import CurrentStep
from autoamp.core.listeners import Listeners
from autoamp.core.loss_scale import LossScaler
from autoamp.core.ranks import RequestedGroup
from autoamp.core.setting_warnings import BufferWatch
from autoamp.core.unread_flags import UnreadFlags

logger = logging.getLogger(__name__)


# The class of the guards, which a file above this one has.
Guard = TypeVar("Guard")


class StepOwner(Generic[Guard]):
    """What the guard of an optimizer asks and tells. This one knows of no handle, and does nothing."""

    listeners = Listeners()
    """What looks on."""

    current = CurrentStep(listeners)
    """The step at hand."""

    casts: CastState | None = None
    """What casts for the program: off while the optimizer steps, and on in a closure."""

    undoes_steps = False
    """Whether a step that meets inf or nan in a later evaluation of its closure is undone."""

    max_consecutive_skips = 50
    """So many skips of one optimizer in a row are an error."""

    def __init__(self) -> None:
        self.step_stats = StepCounts(lambda: None)

    @property
    def scalers(self) -> Sequence[LossScaler]:
        """All loss scalers, in the same order on all ranks."""
        return ()

    def requested_group(self, optimizer: Any) -> RequestedGroup | None:
        """Return the process group over which the program wants steps to be agreed on, if it asked for one."""
        return None

    def refuse_scaled(self, guard: Guard) -> None:
        """Raise UsageError if gradients of the optimizer are scaled still, by a block that did not name it."""

    def step_begins(self, guard: Guard) -> None:
        """Called at each step, before it is taken or skipped."""


class Step:
    """The record of one call of ``optimizer.step()``, of any optimizer, until its next one.

    Attributes:
        skipped_by: What skipped it, as far as the host knows: a loss scaler, whose gradients overflowed, or the name of
            a rule. None for a step that was taken, or that still runs.
        scale: The loss scale of a skip; nan where it is not known.
        is_late: Whether others may have been taken before the host knew what became of it.
        explanation: What explains a skip; None if diagnostics did not record it.
        unread: Tells of this step or of those before it, if a guard left the flag of an overflow on the device.
        flag: Not 0 for a skip, if the program's own scaler left it to the optimizer.
    """

    __slots__ = ("explanation", "flag", "is_late", "scale", "skipped_by", "unread")

    def __init__(self) -> None:
        self.skipped_by: LossScaler | str | None = None
        self.scale = 1.0
        self.is_late = False
        self.explanation: Any = None
        self.unread: UnreadFlags | None = None
        self.flag: Tensor | None = None

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped; False while it runs. Waits for the device where that alone knows."""
        if self.unread is not None:
            self.unread.catch_up()
        if self.skipped_by is None and self.flag is not None:
            self.skipped_by = "torch.amp.GradScaler" if self.flag else None
            self.flag = None
        return self.skipped_by is not None


class Skips:
    """How many steps one optimizer took, and which were skips. Reading them waits for flags on the device.

    It refers to nothing of the optimizer, so that flags that are still on their way keep no weights alive.

    Args:
        name: Of the optimizer, for the log.
        owner: Returns what hears of each skip.

    Attributes:
        steps: How many times ``step()`` was called, skips included.
        total: How many of these are known to be skips.
        in_a_row: How many are known to be skips since the last step that is known to be taken.
        step: The last of these calls.
        name: As given.
        owner: As given.
        has_held: Whether any step was taken: at its scale gradients did not overflow.
    """

    def __init__(self, name: str, owner: Callable[[], StepOwner[Any]]) -> None:
        self.steps = self.total = self.in_a_row = 0
        self.step = Step()
        self.owner = owner
        self.name = name
        self.has_held = False

    def begin(self) -> Step:
        """Begin the record of another step."""
        self.steps += 1
        before, self.step = self.step, Step()
        self.step.unread = before.unread
        return self.step

    def catch_up(self) -> None:
        """Learn what became of the last steps where that is on the device still; waits for it."""
        if self.step.unread is not None:
            self.step.unread.catch_up()

    def end(self, step: Step, skipped_by: LossScaler | None = None, scale: float = 1.0, *, late: bool = False) -> None:
        """Count a step, and tell those who are to hear of it.

        Args:
            step: The last one, or with ``late`` one before.
            skipped_by: The scaler of a skip; None for a step that was taken.
            scale: The one that was too high.
            late: Whether others may have been taken since.
        """
        self.catch_up()
        step.unread, step.is_late = None, late
        owner = self.owner()
        if skipped_by is None:
            self.in_a_row, self.has_held = 0, True
            for taken in owner.listeners.step_taken:
                taken(self, step)
            return
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        step.skipped_by, step.scale = skipped_by, scale
        owner.step_stats.add_skip()
        for skipped in owner.listeners.step_skipped:
            step.explanation = skipped(self, step) or step.explanation
        if self.total & (self.total - 1) == 0:
            logger.warning(
                "%s: step skipped, gradients overflowed at loss scale %g, the next is %g (skipped %d, in a row %d)",
                self.name, scale, skipped_by.loss_scale, self.total, self.in_a_row,
            )  # fmt: skip


class StepCounts:
    """How many steps the optimizers of a handle took, of all together.

    Args:
        catch_up: Lets the handle's loss scalers hear of steps of which only the device knows whether they were skips.

    Attributes:
        steps: Steps of guarded optimizers, skips and those of `FP16_Optimizer` included.
        plain: Steps of optimizers without a guard.
        own: The loss scalers of the program's own `FP16_Optimizer`, the newest last.
        own_scale: The scale of the program's own `torch.amp.GradScaler`; None where it has none.
        last: The last step of any optimizer.
    """

    def __init__(self, catch_up: Callable[[], None]) -> None:
        self.steps = self.plain = 0
        self.own: list[LossScaler] = []
        self.own_scale: SupportsFloat | None = None
        self.last = Step()
        self._catch_up, self._buffers = catch_up, BufferWatch()
        self._skipped = 0

    @property
    def all(self) -> int:
        """How many steps there were, skips included."""
        return self.steps + self.plain

    @property
    def skipped(self) -> int:
        """How many steps were skipped. Waits for the device where only that knows."""
        self._catch_up()
        for scaler in self.own:
            scaler.unread.catch_up()
        return self._skipped

    def loss_scale(self, ours: float) -> float:
        """Return the scale that losses have: that of the program's own scaler, if it has one, else ours."""
        if self.own:
            return self.own[-1].loss_scale
        return ours if self.own_scale is None else float(self.own_scale)

    def step_begins(self, step: Step) -> None:
        """Count a step of a guarded optimizer."""
        self.steps += 1
        self.last = step

    def add_own(self, scaler: LossScaler) -> None:
        """Take note of the scaler of an `FP16_Optimizer`."""
        if scaler not in self.own:
            self.own.append(scaler)

    def add_skip(self) -> None:
        """Count a skip, and tell once of buffers in which skipped steps have left inf or nan."""
        self._skipped += 1
        self._buffers.look()

    def reset(self, steps: int = 0, skipped: int = 0) -> None:
        """Count steps and skips from these numbers on."""
        self._catch_up()
        self.steps, self._skipped = steps, skipped
