"""The steps that a recording samples, and what it adds up of them."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from autoamp.diagnostics.counts import floating_tensors
from autoamp.diagnostics.observer import Call, Observer, Watch
from autoamp.diagnostics.ranges import ValueProfile
from autoamp.diagnostics.trace import CastTrace
from autoamp.torch_private import dispatch_modes

__all__ = ["Allowance", "Sample", "Samples", "plan"]

log = logging.getLogger(__name__)

# A sample ends after so many calls of listed functions, or bytes of tensors that these got.
_MOST_CALLS = 5_000
_MOST_BYTES = 2**31
# Samples and comparisons together may take so many seconds, and so much of the time since the beginning.
_FREE, _PART = 2.0, 0.1
_EVERY = 1000


def plan(step: int) -> str | None:
    """Return what is sampled of the step of this number, from 0: ``"casts"``, ``"values"`` or None.

    ``"casts"`` is a cast trace, ``"values"`` the exponents of values and gradients. Two steps in a row are sampled:
    from 0, 10 and 100 on, and from each 1000th on.
    """
    first = max(one for one in (0, 10, 100, step - step % _EVERY) if one <= step)
    return {0: "casts", 1: "values"}.get(step - first)


class Allowance:
    """The time that a recording may take from the program: 2 s, and a tenth of the time since it began.

    Attributes:
        began: When it began, by `time.perf_counter`.
        spent: The seconds that were taken.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.spent = 0.0

    def left(self) -> float:
        """Return the seconds that may still be taken; below 0 where it was more."""
        return _FREE + _PART * (time.perf_counter() - self.began) - self.spent


class Sample(NamedTuple):
    """One look at a step.

    Attributes:
        step: Its number.
        kind: One that `plan` returns.
        seconds: How long it took, with the program's own time.
        whole: Whether it went on to the end of the step.
    """

    step: int
    kind: str
    seconds: float
    whole: bool


@dataclass
class _Running:
    """A sample that runs, and what it has seen so far."""

    step: int
    kind: str
    looking: CastTrace | ValueProfile
    calls: int = 0
    bytes: int = 0
    thread: int = field(default_factory=threading.get_ident)
    began: float = field(default_factory=time.perf_counter)


class Samples(Observer):
    """Samples some steps, and adds up their casts and values.

    It stays an observer between two sampled steps: a sample may end in torch's hook of a step, where no replacement can
    be installed.

    Args:
        handle: Whose run it is.
        allowance: The time that may be taken.

    Attributes:
        steps: The samples so far.
        trace: The casts of all samples of kind ``"casts"``.
        values: The exponents of all samples of kind ``"values"``.
        uncast: By reason, op and place how often a listed function was called with casts off.
        left_out: How many samples were not taken, as those before had taken the time for them.
        trouble: Why the last step that could not be sampled was not; None where all were.
    """

    def __init__(self, handle: Any, allowance: Allowance) -> None:
        self.steps: list[Sample] = []
        self.trace = CastTrace(handle.casts, handle.observation, handle.observe)
        self.values = ValueProfile(handle.observation, handle.observe)
        self.uncast: Counter[tuple[str, str, str]] = Counter()
        self.left_out = 0
        self.trouble: str | None = None
        self._handle = handle
        self._allowance = allowance
        self._running: _Running | None = None
        self._watch: Watch | None = None

    # -- steps --

    def await_step(self, step: int, *, may_install: bool = True) -> None:
        """Begin a sample at the next call of a model, if the coming step is to be sampled.

        Args:
            step: Its number.
            may_install: Whether replacements may be installed now.
        """
        if self._running is not None:
            return
        wanted = plan(step) is not None
        if may_install and wanted and self._watch is None:
            self._watch = self._handle.observe(self)
        elif may_install and not wanted and self._watch is not None:
            self.stop()
        if wanted and self._watch is not None:
            # Not before a model is called: what comes before is no step.
            self._handle.observation.on_model = functools.partial(self._model_called, step)

    def _model_called(self, step: int) -> None:
        # Between two steps a program may evaluate, which is no part of either. Before the first it may be all there is.
        if step == 0 or torch.is_grad_enabled():
            self._handle.observation.on_model = None
            self._begin(step)

    def before_step(self, optimizer: Any) -> None:
        """Count the exponents of the gradients that an optimizer is about to use, in samples of values."""
        if self._running is not None and self._running.kind == "values":
            self.values.read_gradients([param for group in optimizer.param_groups for param in group["params"]])

    def stop(self) -> None:
        """Stop observing."""
        self._handle.observation.on_model = None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    # -- samples --

    def _begin(self, step: int) -> None:
        kind = plan(step)
        # Modes of the program that it ends later would be ended in our place.
        if kind is None or dispatch_modes():
            return
        if self._allowance.left() < 0:
            self.left_out += 1
            return
        running = _Running(step, kind, self.trace if kind == "casts" else self.values)
        try:
            running.looking.__enter__()
        except RuntimeError as error:
            self.trouble = f"step {step} could not be looked at: {error}"
            log.debug("a step could not be looked at", exc_info=True)
            return
        self._running = running

    def end(self, why: str) -> None:
        """End the sample that runs, if any.

        Args:
            why: ``"step"``: the step has ended. ``"limit"``: before that. ``"end"``: so has the recording.
        """
        running = self._running
        if running is None:
            return
        if running.thread != threading.get_ident() or dispatch_modes() > 1:
            # Modes end in the thread and in the order in which they began.
            if why == "end":
                self.trouble = f"step {running.step} was not looked at to its end: another thread or mode runs"
                self._running = None
            return
        self._running = None
        running.looking.__exit__(None, None, None)
        seconds = time.perf_counter() - running.began
        self._allowance.spent += seconds
        self.steps.append(Sample(running.step, running.kind, seconds, whole=why != "limit"))

    def before(self, call: Call) -> None:
        """Count a call, and end a sample that has taken enough."""
        running = self._running
        if running is None:
            return
        if not call.casting and call.outer is None:
            inside = torch.is_autocast_enabled(self._handle.settings.device_type)
            why = "within torch.autocast" if inside else "with casts off"
            self.uncast[why, call.op.name, call.site.location or "-"] += 1
        running.calls += 1
        running.bytes += sum(tensor.nbytes for tensor in floating_tensors(call))
        late = time.perf_counter() - running.began > self._allowance.left()
        if call.outer is None and (running.calls >= _MOST_CALLS or running.bytes >= _MOST_BYTES or late):
            self.end("limit")
