"""Calls of models with gradients off: whether their outputs held inf or nan, and what made it.

Each call is recorded until the first inf or nan was explained.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from autoamp.core import local_of
from autoamp.tensors import iter_tensors
from autoamp.tools.origins import nonfinite_value
from autoamp.tools.ranges import readable_tensors
from autoamp.tools.step_recorder import RecordedStep, StepRecorder, unwrapped
from autoamp.tools.tables import counted
from autoamp.tools.verdicts import Overflow
from autoamp.torch_private import undisturbed

log = logging.getLogger(__name__)


class Inferences:
    """Looks at calls of models with gradients off.

    Args:
        recorder: Records calls.
        explain: Explains a recorded call by the tape, with its outputs as losses; None if inf was written on purpose.

    Attributes:
        calls: The number of calls.
        nonfinite: How many of them gave inf or nan.
        found: What made inf or nan, in the order in which it was found.
    """

    def __init__(self, recorder: StepRecorder, explain: Callable[[RecordedStep], Overflow | None]) -> None:
        self.calls = 0
        self.nonfinite = 0
        self.found: list[Overflow] = []
        self._recorder = recorder
        self._explain = explain
        self._model = ""
        # Classes of models that write inf to their outputs on purpose.
        self._on_purpose: set[type] = set()

    @property
    def sentence(self) -> str | None:
        """What was found in words; None if all outputs were finite."""
        if not self.nonfinite:
            return None
        cause = self.found[0]
        remedy = f"; {cause.suggestion}" if cause.suggestion else ""
        calls = counted(self.nonfinite, "call")
        return f"{calls} of {self._model} with gradients off gave inf or nan: {cause.cause}{remedy}"

    def begin(self, module: Module, args: Any, kwargs: Any) -> Callable[[Any], None]:
        """Begin a call; it is recorded unless what makes inf or nan is known. Returns what is given its outputs."""
        self.calls += 1
        recorded, step, kind = contextlib.ExitStack(), None, type(unwrapped(module))
        if not self.found and kind not in self._on_purpose:
            step = recorded.enter_context(self._recorder.one_step())
            self._recorder.record_call(module, args, kwargs)
        return functools.partial(self._end, kind, recorded, step)

    def _end(self, kind: type, recorded: contextlib.ExitStack, step: RecordedStep | None, outputs: Any) -> None:
        """Look at the outputs of a call; None if it raised."""
        if step is not None:
            self._recorder.stop()
        with recorded:
            tensors = readable_tensors([local_of(one) for one in iter_tensors(outputs)])
            with undisturbed():
                is_finite = nonfinite_value(*tensors) is None
            if is_finite or kind in self._on_purpose:
                return
            if step is not None:
                step.loss_refs = list(map(step.tape.find, tensors))
                found = self._explain(step)
                if found is None:
                    self._on_purpose.add(kind)
                    return
                self.found.append(found)
            self.nonfinite += 1
            self._model = self._model or kind.__name__
            if step is not None:
                log.warning("%s", self.sentence)
