"""The result of a survey of a program: the time of each listed op in each dtype, and its range and error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VARIANTS = ("fp32", "half", "half_cast")
"""How an op is timed: in fp32; in half; in half on fp32 arguments, its result cast back."""


@dataclass
class Use:
    """The calls of one op at one place with arguments of the same shapes.

    Attributes:
        op: The function's dotted name, or torch's name of an operator that no list casts.
        target: How a list names it.
        policy: The policy in force, ``"unlisted"`` if there is none.
        module_class: The dotted name of the innermost module's class, None outside of modules.
        location: ``"file:line"`` of the call.
        module: The path of the innermost module in the outermost one; None if it has modules within, and outside of
            modules.
        calls: How often it was called while the survey ran.
        seconds: The time of a call by `VARIANTS`, with its backward pass if gradients are recorded; a variant is absent
            if it cannot be run. None if nothing was timed.
        overflow: How many of its arguments and results overflow in the half dtype.
        largest: The largest binary exponent of these, None if all are 0.
        error: The largest relative error of its operators in the half dtype; None if that is unknown.
    """

    op: str
    target: str
    policy: str
    module_class: str | None = None
    location: str | None = None
    module: str | None = None
    calls: int = 0
    seconds: Mapping[str, float] | None = None
    overflow: int = 0
    largest: int | None = None
    error: float | None = None

    def total(self, variant: str) -> float | None:
        """Return the seconds of all calls; None if this variant was not timed."""
        seconds = None if self.seconds is None else self.seconds.get(variant)
        return None if seconds is None else seconds * self.calls


@dataclass(frozen=True)
class Survey:
    """All uses of a program's ops, as far as it ran.

    Attributes:
        device_type: The device that the program computes on.
        dtype: The half dtype, ``"float16"`` or ``"bfloat16"``.
        torch: The version of torch.
        steps: How many steps optimizers made meanwhile, at least 1. Times a step are totals divided by this.
        uses: The uses.
        untimed: How many of these there was no time left for.
    """

    device_type: str
    dtype: str
    torch: str = ""
    steps: int = 1
    uses: tuple[Use, ...] = ()
    untimed: int = 0
