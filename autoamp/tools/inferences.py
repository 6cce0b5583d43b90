"""Calls of models with gradients off: whether their outputs held inf or nan, and what made it.

One sum over the outputs tells. Each call is recorded until the first inf or nan was explained.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core import UnreadFlags, local_of, original_of
from autoamp.tensors import iter_tensors
from autoamp.tools.step_recorder import RecordedStep, StepRecorder, unwrapped
from autoamp.tools.tables import counted
from autoamp.tools.verdicts import Overflow
from autoamp.torch_private import undisturbed

log = logging.getLogger(__name__)

# Torch's own, also if this file is imported while lists are in force.
_SUM: Any = original_of(Tensor.sum)


class Inferences:
    """Looks at calls of models with gradients off.

    Args:
        recorder: Records calls.
        explain: Explains a recorded call by the tape, with its outputs as losses; None if inf was written on purpose.

    Attributes:
        calls: The number of calls.
        found: What made inf or nan, in the order in which it was found.
    """

    def __init__(self, recorder: StepRecorder, explain: Callable[[RecordedStep], Overflow | None]) -> None:
        self.calls = 0
        self.found: list[Overflow] = []
        self._recorder = recorder
        self._explain = explain
        self._nonfinite = 0
        self._model = ""
        # Classes of models that write inf to their outputs on purpose.
        self._on_purpose: set[type] = set()
        self._unread = UnreadFlags()

    @property
    def nonfinite(self) -> int:
        """How many calls gave inf or nan. Waits for the device where that alone knows of the last ones."""
        self._unread.catch_up()
        return self._nonfinite

    @property
    def sentence(self) -> str | None:
        """What was found in words; None if all outputs were finite."""
        if not self.nonfinite:
            return None
        calls = f"{counted(self.nonfinite, 'call')} of {self._model} with gradients off gave inf or nan"
        if not self.found:
            return f"{calls}: not located, since the call was not recorded"
        cause = self.found[0]
        return f"{calls}: {cause.cause}" + (f"; {cause.suggestion}" if cause.suggestion else "")

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
        known = (one for one in iter_tensors(outputs) if one.is_floating_point() and not one.is_meta)
        tensors = [local_of(one) for one in known if one.layout is torch.strided]
        with recorded:
            if not tensors or kind in self._on_purpose:
                return
            with undisturbed():
                # A sum of finite values is finite in double precision.
                wide = torch.float32 if tensors[0].device.type == "mps" else torch.float64
                flag = functools.reduce(torch.add, [_SUM(one, dtype=wide).to(tensors[0].device) for one in tensors])
                flag = flag.isfinite().logical_not()
            if step is None and self._unread.serves(flag.device):
                self._unread.add(flag, functools.partial(self._known, kind), urgent=True)
                return
            self._known(kind, bool(flag))
            if step is None or not bool(flag):
                return
            step.loss_refs = list(map(step.tape.find, tensors))
            found = self._explain(step)
            if found is None:
                self._on_purpose.add(kind)
                self._nonfinite, self._model = 0, ""
            else:
                self.found.append(found)
                log.warning("%s", self.sentence)

    def _known(self, kind: type, is_nonfinite: bool) -> None:
        """Take note of a call whose outputs are known."""
        if is_nonfinite and kind not in self._on_purpose:
            self._nonfinite += 1
            self._model = self._model or kind.__name__
