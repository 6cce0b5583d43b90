"""The steps that a recording samples: their casts, and the exponents of their values and gradients."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autoamp.diagnostics.observer import Call, Observer
from autoamp.diagnostics.ranges import ValueProfile
from autoamp.diagnostics.trace import CastTrace
from autoamp.torch_private import DispatchMode, dispatch_modes

__all__ = ["Sample", "Samples", "is_sampled"]

# A sample ends after so many calls of listed functions: a program that only evaluates makes no step.
_MOST_CALLS = 5_000
# Those of the trace and of the values.
_MODES = 2


def is_sampled(step: int) -> bool:
    """Tell whether the step of this number, from 0, is sampled: steps 0, 10 and 100, and each 1000th."""
    return step in (0, 10, 100) or step % 1000 == 0


class Sample(NamedTuple):
    """A sampled step.

    Attributes:
        step: Its number.
        whole: Whether the sample lasted to the end of the step.
    """

    step: int
    whole: bool


@dataclass
class _RunningSample:
    step: int
    stack: contextlib.ExitStack
    thread: int
    calls: int = 0


class Samples(Observer):
    """Samples some steps, and adds up their casts and values.

    Args:
        handle: The `Runtime` of the run.

    Attributes:
        steps: The samples so far.
        trace: The casts of all samples.
        values: The exponents of all samples.
        uncast: The calls of listed functions with casts off, by reason, op and line.
    """

    def __init__(self, handle: Any) -> None:
        self.steps: list[Sample] = []
        self.trace = CastTrace(handle.casts, handle.observation, handle.observe)
        self.values = ValueProfile(handle.observation, handle.observe)
        self.uncast: Counter[tuple[str, str, str]] = Counter()
        self._observation = handle.observation
        self._device_type = handle.settings.device_type
        self._running: _RunningSample | None = None

    def await_step(self, step: int) -> None:
        """Begin a sample at the next call of a model, if the coming step is to be sampled."""
        if is_sampled(step) and self._running is None:
            self._observation.on_model = functools.partial(self._model_called, step)

    def ended(self) -> None:
        """Await no step any more."""
        self._observation.on_model = None

    def _model_called(self, step: int) -> None:
        # A call without gradients between two steps is an evaluation. Before step 0 it may be the whole program.
        if step == 0 or torch.is_grad_enabled():
            self._observation.on_model = None
            self._begin(step)

    def _begin(self, step: int) -> None:
        # The program's own mode may end before the step, and the mode that began last ends first.
        if DispatchMode is None or dispatch_modes():
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.trace)
            stack.enter_context(self.values)
            self._running = _RunningSample(step, stack.pop_all(), threading.get_ident())

    def step_begins(self, optimizer: Any) -> None:
        """Count the gradients that an optimizer is about to use, in a sample."""
        if self._running is not None:
            self.values.step_begins(optimizer)

    def end(self, *, whole: bool) -> None:
        """End the running sample, if there is one.

        Args:
            whole: Whether the step has ended.
        """
        running = self._running
        if running is None or running.thread != threading.get_ident() or dispatch_modes() > _MODES:
            # A mode ends in the thread in which it began, and after the modes that began later.
            return
        self._running = None
        running.stack.close()
        self.steps.append(Sample(running.step, whole))

    def before(self, call: Call) -> None:
        """Note a call with casts off, and end a sample that has become too long."""
        running = self._running
        if running is None or call.outer is not None:
            return
        if not call.casting:
            inside = torch.is_autocast_enabled(self._device_type)
            why = "within torch.autocast" if inside else "with casts off"
            self.uncast[why, call.op.name, call.site.location or "-"] += 1
        running.calls += 1
        if running.calls >= _MOST_CALLS:
            self.end(whole=False)
