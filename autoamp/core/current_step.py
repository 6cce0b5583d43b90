"""The step at hand: the losses that make its gradients, by which a step that no loss scale checks is judged too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, SupportsFloat

from torch import Tensor

from autoamp.core.gradients import local_of
from autoamp.core.listeners import Listeners
from autoamp.tensors import compacted
from autoamp.torch_private import has_modes, undisturbed

_MAX_LOSSES = 256


class CurrentStep:
    """What is known of a step until the next one begins.

    Args:
        listeners: Hear of losses, of the call of an optimizer, and of the end of a step.

    Attributes:
        losses: The losses of one element since the last step, the first 256, without their graph.
        unscaled: Those that no loss scale multiplies.
        waiting: The number of losses that were scaled and whose backward pass has not begun.
        refuses: Tells of an optimizer and its guard, or None, whether a step by unchecked gradients is to be skipped.
        after: Called when a step was taken or skipped.
        reads_flags: Whether the host is to learn at once what becomes of the step.
    """

    def __init__(self, listeners: Listeners) -> None:
        self.losses: list[Tensor] = []
        self.unscaled: list[Tensor] = []
        self.waiting = 0
        self.reads_flags = False
        self.refuses: Callable[[Any, Any], bool] = lambda optimizer, guard: False
        self.after: Callable[[], object] = lambda: None
        self._listeners = listeners
        # Other optimizers may step by the same losses until the next one comes.
        self._ended = False

    def scale(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Take note of a loss that is multiplied by a scale, and whose backward pass is yet to begin."""
        self.note(loss, scale)
        self.waiting += 1

    def note(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Take note of a loss before its backward pass.

        Args:
            loss: The loss before it is multiplied.
            scale: The scale, which may be known to the device alone; 1.0 for a loss that nobody scales.
        """
        if self._ended:
            self.losses, self.unscaled, self.waiting, self._ended = [], [], 0, False
        if loss.numel() == 1 and len(self.losses) < _MAX_LOSSES:
            with undisturbed() if has_modes() else contextlib.nullcontext():
                value = compacted(loss.detach())
            self.losses.append(value)
            if type(scale) is float and scale == 1.0:
                self.unscaled.append(value)
        for scaled in self._listeners.loss_scaled:
            scaled(loss, scale)

    def begin(self) -> None:
        """Take note that an optimizer is called."""
        self._ended, self.reads_flags = True, False
        for begun in self._listeners.step_begun:
            self.reads_flags |= begun()

    def end(self, step: Any) -> None:
        """Take note that a step was taken or skipped, as its `autoamp.core.Step` tells."""
        self.after()
        for ended in self._listeners.step_ended:
            ended(step)

    @property
    def loss_is_nonfinite(self) -> bool:
        """Whether a loss itself held inf or nan. Waits for the device."""
        with undisturbed():
            return any(not bool(local_of(loss).isfinite().all()) for loss in self.losses)
