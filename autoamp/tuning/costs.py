"""What a survey of a program found: what each listed op costs in each dtype, and what half precision makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["VARIANTS", "Cost", "Survey", "Use"]

VARIANTS = ("fp32", "half", "half_cast", "fp32_cast")
"""How an op is timed: in fp32; in half; in half on fp32 arguments, its result cast back; in fp32 on half arguments."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call costs.

    Attributes:
        seconds: Of the call, with its backward where gradients are recorded and with its casts.
        bytes: What it keeps for backward and returns, its arguments apart.
    """

    seconds: float
    bytes: int = 0


@dataclass(frozen=True)
class Use:
    """The calls of one op at one place with arguments of the same shapes.

    Attributes:
        op: The function's dotted name, or torch's name of an operator that no list casts.
        target: How a list names it.
        policy: The policy in force, ``"unlisted"`` where none is.
        calls: How often it was called while the survey ran.
        origin: The list file and line of the rule, None for an op on no list.
        module_class: The dotted name of the innermost module's class, None outside of modules.
        location: ``"file:line"`` of the call.
        shapes: The shapes of its tensors, for people.
        costs: By `VARIANTS`; an absent one cannot be run. None where nothing was timed.
        overflow: How many of its arguments and results overflow in the half dtype.
        largest: The largest binary exponent of these, None where all are 0.
        error: The largest relative error of its operators in the half dtype; None where that is unknown.
        module: The path of the innermost module in the outermost one; None where it has modules within, and outside
            of modules.
    """

    op: str
    target: str
    policy: str
    calls: int
    origin: str | None = None
    module_class: str | None = None
    location: str | None = None
    shapes: str = ""
    costs: Mapping[str, Cost] | None = None
    overflow: int = 0
    largest: int | None = None
    error: float | None = None
    module: str | None = None

    def total(self, variant: str) -> Cost | None:
        """Return the cost of all its calls; None where this variant was not timed."""
        cost = None if self.costs is None else self.costs.get(variant)
        return None if cost is None else Cost(cost.seconds * self.calls, cost.bytes * self.calls)


@dataclass(frozen=True)
class Survey:
    """All uses of a program's ops, as far as it ran.

    Attributes:
        device_type: Where the program computes.
        dtype: The half dtype, ``"float16"`` or ``"bfloat16"``.
        torch: The version of torch.
        steps: How many steps optimizers made meanwhile, at least 1, which figures are divided by.
        uses: What was called.
        untimed: How many of these there was no time left for.
    """

    device_type: str
    dtype: str
    torch: str = ""
    steps: int = 1
    uses: tuple[Use, ...] = field(default_factory=tuple)
    untimed: int = 0
