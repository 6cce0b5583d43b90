"""Compares a step with the same step in fp32.

An op may overflow although every gradient is finite: 1 / inf is 0, and so is each gradient before it. The step is not
skipped. The tape of the step runs again, in half precision and in fp32, to find such an op.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

from autoamp.diagnostics.evidence import Evidence
from autoamp.diagnostics.findings import half_precision_finding
from autoamp.diagnostics.origins import Followed, Origin
from autoamp.diagnostics.ranges import relative_error
from autoamp.diagnostics.tables import first_of
from autoamp.diagnostics.verdicts import Overflow
from autoamp.tape import everything
from autoamp.tensors import HALF_DTYPES

__all__ = ["Fault", "StepCheck"]

log = logging.getLogger(__name__)

# Gradients below this part of the largest one differ in any precision.
_SMALL = 1e-3
# From this difference on, as a part of the gradient in fp32, the gradient in half precision is wrong.
_FAR = 0.5


@dataclass(frozen=True)
class Fault:
    """An op that overflows in half precision in a step that was not skipped.

    Attributes:
        sentence: What was found, without the remedy.
        overflow: The op, and the number of the step.
    """

    sentence: str
    overflow: Overflow


class StepCheck:
    """Compares steps that are about to be taken with fp32, by the tapes that `OverflowTrace` recorded.

    Args:
        handle: The `Runtime` of the run. Nothing is compared unless it traces overflows.

    Attributes:
        faults: The ops that overflowed in steps that were not skipped.
        compared: The number of steps that were compared.
        unchecked: Why the last step that could not be compared was not; None if all were.
    """

    def __init__(self, handle: Any) -> None:
        self.faults: list[Fault] = []
        self.compared = 0
        self.unchecked: str | None = None
        self._handle = handle

    def compare(self, step: int) -> None:
        """Compare the coming step with fp32, if its number, from 0, is 0, 1, 4, 16 and so on."""
        due = step == 0 or (step.bit_count() == 1 and step.bit_length() % 2 == 1)
        if not (due and self._handle.overflows.always):
            return
        try:
            fault = self._fault_of_step(step)
            self.compared += 1
            if fault is not None and fault.overflow.place not in [known.overflow.place for known in self.faults]:
                self.faults.append(fault)
        except Exception as error:
            # A comparison never ends the program.
            self.unchecked = str(error) or type(error).__name__
            log.debug("a step could not be compared with fp32", exc_info=True)

    def _fault_of_step(self, step: int) -> Fault | None:
        """Return the first op that overflows in half precision, if that changes gradients."""
        run = self._handle
        evidence = run.overflows.evidence(run.overflows.recorder.step, 1.0)
        with run.observation.quietly(), run.casts.switched(False, forced_off=True):
            half = evidence.follow()
            origin = next((one for one in half.origins if _overflows_in_half(one)), None)
            # If gradients are not finite the step will be skipped, and that overflow is explained.
            if origin is None or half.at_gradients:
                return None
            wide = evidence.follow(everything)
            names = _wrong_gradients(evidence, half, wide)
            if not names:
                return None
            overflow = half_precision_finding(evidence, origin, wide)
        wrong = first_of(names, 4)
        sentence = f"{overflow.cause}; the step was taken, and the gradients of {wrong} are not those of fp32"
        return Fault(sentence, replace(overflow, iteration=step, parameter=names[0]))


def _overflows_in_half(origin: Origin) -> bool:
    return origin.op is not None and origin.ref.dtype in HALF_DTYPES and not origin.intended


def _wrong_gradients(step: Evidence, half: Followed, wide: Followed) -> list[str]:
    """Return the parameters whose gradients are wrong in half precision."""
    refs = {one.name: one.ref for one in step.named if one.kind == "grad"}
    in_fp32 = {name: wide.rerun.value(ref).float() for name, ref in refs.items()}
    sizes = {name: float(one.double().square().mean().sqrt()) for name, one in in_fp32.items() if one.numel()}
    if not all(map(math.isfinite, sizes.values())):
        return []
    smallest = _SMALL * max(sizes.values(), default=0.0)
    large = [name for name, size in sizes.items() if size > smallest]
    return [name for name in large if relative_error(half.rerun.value(refs[name]), in_fp32[name]) > _FAR]
