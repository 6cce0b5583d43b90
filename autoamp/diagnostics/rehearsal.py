"""Runs a step of the program once, on demand, to record it.

The step is a function of the program. While it runs, its losses are scaled by a given scale, its backward passes leave
no gradients, and it ends where an optimizer is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autoamp.auto_scaling import reached_by
from autoamp.diagnostics.inspector import nonfinite_value
from autoamp.diagnostics.records import Recorder
from autoamp.diagnostics.replay import why_it_failed
from autoamp.patching import PatchSet
from autoamp.scaling import scaled_loss

__all__ = ["Rehearsal"]


class _StepReached(BaseException):
    """Leaves a step at its ``optimizer.step()``, or after a backward pass with inf or nan."""


class Rehearsal:
    """One run of a step; see `autoamp.stepping.Rehearsing`.

    Args:
        recorder: Records the step.
        scale: The loss scale.

    Attributes:
        passes: The number of backward passes.
        overflowed: Whether a loss or a gradient holds inf or nan.
        failure: Why a backward pass could not run; None if all ran.
    """

    def __init__(self, recorder: Recorder, scale: float) -> None:
        self.passes = 0
        self.overflowed = False
        self.failure: str | None = None
        self._recorder = recorder
        self._scale = scale
        self._scaled: set[Tensor] = set()

    def run(self, step: Callable[[], Any]) -> None:
        """Run a step, and the backward pass of the loss that it returns if it ran none."""
        patches = PatchSet()
        patches.replace(torch.autograd, "backward", self._backward)
        try:
            result = step()
            if not self.passes and isinstance(result, Tensor) and result.requires_grad:
                self.backward(result)
        except _StepReached:
            pass
        finally:
            patches.restore()

    @contextlib.contextmanager
    def scaled(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield a loss multiplied by the scale, as ``scale_loss`` does."""
        self._note(loss)
        scaled = scaled_loss(loss, self._scale)
        self._scaled.add(scaled)
        yield scaled

    def backward(self, loss: Tensor) -> None:
        """Scale a loss and run its backward pass."""
        with self.scaled(loss) as scaled:
            self._backward([scaled])

    def step_reached(self) -> BaseException:
        """Return what leaves the step where an optimizer is called."""
        return _StepReached()

    def _note(self, loss: Tensor) -> None:
        self.overflowed = self.overflowed or nonfinite_value(loss) is not None
        self._recorder.note_loss(loss, self._scale)

    def _backward(self, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass that leaves no gradients: what `torch.autograd.backward` does in a rehearsal."""
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors or [None] * len(roots)
        wanted, gradients = [], []
        for root, gradient in zip(roots, given, strict=True):
            if root.requires_grad:
                gradient = torch.ones_like(root) if gradient is None else gradient
                if root not in self._scaled:
                    self._note(root)
                    gradient = gradient * self._scale
                wanted.append(root)
                gradients.append(gradient)
        leaves = reached_by(wanted)[0]
        if not leaves:
            return
        self.passes += 1
        try:
            found = torch.autograd.grad(wanted, leaves, gradients, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            self.failure = why_it_failed(error)
            raise _StepReached from None
        if self.overflowed or nonfinite_value(*found):
            self.overflowed = True
            raise _StepReached
