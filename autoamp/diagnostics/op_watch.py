"""Looks at ops outside of module calls, as those of a loss, while they run: they cannot run again.

That is slow, so only some steps are watched: the first step of a traced run, and the steps after an overflow that was
not located. The ops of module calls are not watched: these calls are recorded, and run again.
"""

from __future__ import annotations

import itertools
from typing import SupportsFloat

from torch import Tensor

from autoamp.casting import Casts
from autoamp.diagnostics.inspector import Backward, Inspector, Origin, nonfinite_value
from autoamp.diagnostics.verdicts import HalfPrecisionOp, NotFiniteInFp32, NotLocated, Overflow, ScaleSearch

__all__ = ["OpWatch"]


class OpWatch:
    """The ops of one step that are watched.

    Args:
        casts: How threads cast.
    """

    def __init__(self, casts: Casts) -> None:
        self._inspector = Inspector(casts=casts)
        self._losses: list[Origin] = []
        self._passes: list[Backward] = []

    def resume(self, outputs: object) -> None:
        """Watch from now on: a module call has ended, with these outputs."""
        self._inspector.begin_between(outputs)

    def pause(self) -> None:
        """Watch no more: a module call or a backward pass begins."""
        self._inspector.end_between()

    def begin_backward(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Look at a loss, and at its backward pass, which is about to run."""
        self.end()
        self._inspector.take_functions(loss)
        if nonfinite_value(loss):
            self._losses.append(self._inspector.origin_of(loss))
        self._passes.append(Backward(self._inspector, scale=float(scale)).__enter__())

    def end(self) -> None:
        """Watch no more: the step has ended."""
        self.pause()
        for backward in self._passes[-1:]:
            backward.__exit__()

    def finding_of(self, tensor: Tensor) -> Overflow | None:
        """Return the finding for a tensor that an op made of finite values; None if no watched op did."""
        origin = self._inspector.origin_in_memory(tensor)
        return None if origin is None else _finding(origin, "forward")

    def finding(self) -> Overflow | None:
        """Return the finding for a loss or gradients that hold inf or nan; None if no watched op made it."""
        forward = (_finding(origin, "forward") for origin in self._losses)
        nodes = (result.origin for one in self._passes for result in one.results.values())
        backward = (_finding(origin, "backward") for origin in nodes if origin is not None)
        return next((found for found in itertools.chain(forward, backward) if found is not None), None)


def _finding(made: Origin, phase: str) -> Overflow | None:
    """Return the finding for an op that made inf or nan; None if no op did."""
    site = made.site
    if site is None:
        return None
    if made.finite_at_one:
        return site.finding(ScaleSearch(), phase, made.value)
    if made.finite_in_fp32 is None:
        return site.finding(NotLocated("it is not known whether fp32 would be finite"), phase, made.value)
    if not made.finite_in_fp32:
        advice = "look at the loss: compute it in a form that stays finite"
        return site.finding(NotFiniteInFp32(magnitudes=made.magnitudes), phase, made.value, advice)
    advice = "make the loss smaller, or let what makes the half tensor run in fp32: its gradient is too large"
    verdict = HalfPrecisionOp(made.magnitudes, site.half_name, site.in_cast or site.op == "to")
    return site.finding(verdict, phase, made.value, advice)
