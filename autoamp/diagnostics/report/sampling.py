"""The steps that a recording samples: their casts, and the exponents of their values and gradients."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import torch

from autoamp.diagnostics.observer import Call, Observer
from autoamp.diagnostics.ranges import ValueProfile
from autoamp.diagnostics.trace import CastTrace
from autoamp.torch_private import DispatchMode, dispatch_modes

# A sample ends after so many calls of listed functions: a program that only evaluates makes no step.
_MOST_CALLS = 5_000
# Those of the trace and of the values.
_MODES = 2


def is_sampled(step: int) -> bool:
    """Whether the step of this number, from 0, is sampled: steps 0, 10 and 100, and each 1000th."""
    return step in (0, 10, 100) or step % 1000 == 0


class Samples(Observer):
    """Samples some steps, and adds up their casts and values.

    Args:
        handle: The `Runtime` of the run.

    Attributes:
        steps: The numbers of the sampled steps.
        trace: The casts of all samples.
        values: The exponents of all samples.
    """

    def __init__(self, handle: Any) -> None:
        self.steps: list[int] = []
        self.trace = CastTrace(handle.observation)
        self.values = ValueProfile(handle.observation)
        self._observation = handle.observation
        # Of the running sample: what ends it, its thread, and the number of its calls.
        self._running: contextlib.ExitStack | None = None
        self._thread = 0
        self._calls = 0

    def await_step(self, step: int) -> None:
        """Begin a sample at the next call of a model, if the coming step is to be sampled."""
        if is_sampled(step) and self._running is None:
            self._observation.on_model = functools.partial(self._model_called, step)

    def ended(self) -> None:
        """Await no step any more."""
        self._observation.on_model = None

    def _model_called(self, step: int) -> None:
        # A call without gradients between two steps is an evaluation. Before step 0 it may be the whole program.
        if step > 0 and not torch.is_grad_enabled():
            return
        self._observation.on_model = None
        # The program's own mode may end before the step, and the mode that began last ends first.
        if DispatchMode is None or dispatch_modes():
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.trace)
            stack.enter_context(self.values)
            self._running = stack.pop_all()
        self.steps.append(step)
        self._thread, self._calls = threading.get_ident(), 0

    def end(self) -> None:
        """End the running sample, if there is one."""
        # A mode ends in the thread in which it began, and after the modes that began later.
        if self._running is not None and self._thread == threading.get_ident() and dispatch_modes() <= _MODES:
            self._running.close()
            self._running = None

    def before(self, call: Call) -> None:
        """End a sample that has become too long."""
        if self._running is not None and call.outer is None:
            self._calls += 1
            if self._calls >= _MOST_CALLS:
                self.end()
