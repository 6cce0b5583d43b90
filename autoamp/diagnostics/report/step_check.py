"""Compares a step with the same step in fp32.

An op may overflow although every gradient is finite: 1 / inf is 0, and so is each gradient before it. The step is not
skipped. Other ops only round, and later ones enlarge that. The tape of the step runs again, in half precision and in
fp32, to find such ops.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from autoamp.diagnostics.findings import half_precision_finding
from autoamp.diagnostics.half_losses import is_sampled
from autoamp.diagnostics.overflow import OverflowTrace
from autoamp.diagnostics.roundings import Errors, Rounding, errors_of, find_rounding
from autoamp.diagnostics.tables import first_of
from autoamp.diagnostics.verdicts import Overflow
from autoamp.tape import Rerun, everything
from autoamp.tensors import HALF_DTYPES

log = logging.getLogger(__name__)

# From this difference on, as a part of the gradient in fp32, the gradient in half precision is wrong.
_FAR = 0.5


class StepCheck:
    """Compares steps that are about to be taken with fp32, by the tapes that `OverflowTrace` recorded.

    Args:
        overflows: Records the steps. Nothing is compared unless it records all of them.

    Attributes:
        faults: The ops that overflowed in steps that were not skipped, each with what was found in words.
        roundings: The ops that made steps wrong without an overflow, each with the number of the step.
        farthest: The errors of the step whose gradients were farthest from fp32; None if none were compared.
        compared: The number of steps that were compared.
        unchecked: Why the last step that could not be compared was not; None if all were.
    """

    def __init__(self, overflows: OverflowTrace) -> None:
        self.faults: list[tuple[str, Overflow]] = []
        self.roundings: list[tuple[int, Rounding]] = []
        self.farthest: Errors | None = None
        self.compared = 0
        self.unchecked: str | None = None
        self._overflows = overflows

    def compare(self, step: int) -> None:
        """Compare the coming step with fp32, if its number, from 0, is 0, 1, 4, 16 and so on."""
        if not (self._overflows.always and (step == 0 or is_sampled(step))):
            return
        try:
            self._compare(step)
            self.compared += 1
        except Exception as error:
            # A comparison never ends the program.
            self.unchecked = str(error) or type(error).__name__
            log.debug("a step could not be compared with fp32", exc_info=True)

    def _compare(self, step: int) -> None:
        """Find the first op that overflows in half precision, if that changes gradients, or else ops that round."""
        observation = self._overflows.observation
        evidence = self._overflows.evidence(self._overflows.recorder.step, 1.0)
        with observation.quietly(), observation.casts.switched(False, forced_off=True):
            half = evidence.follow()
            # If gradients are not finite the step will be skipped, and that overflow is explained.
            if half.at_gradients:
                return
            wide = Rerun(evidence.tape, everything).finish()
            errors = errors_of(evidence, half.rerun, wide)
            if self.farthest is None or errors.gradients > self.farthest.gradients:
                self.farthest = errors
            origins = (one for one in half.origins if one.op is not None and one.ref.dtype in HALF_DTYPES)
            origin = next((one for one in origins if not one.intended), None)
            wrong = [name for name, error in errors.parameters.items() if error > _FAR]
            if origin is not None and wrong:
                overflow = half_precision_finding(evidence, origin, evidence.follow(everything))
                if overflow.place not in [known.place for _, known in self.faults]:
                    taken = f"the step was taken, and the gradients of {first_of(wrong, 4)} are not those of fp32"
                    overflow_there = replace(overflow, iteration=step, parameter=wrong[0])
                    self.faults.append((f"{overflow.cause}; {taken}", overflow_there))
            rounding = find_rounding(evidence, errors, wide) if origin is None else None
            if rounding is not None and rounding.ops not in [known.ops for _, known in self.roundings]:
                self.roundings.append((step, rounding))
