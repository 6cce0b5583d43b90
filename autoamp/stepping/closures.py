"""Steps with a closure, of programs that know nothing of loss scaling: it is called when the optimizer calls it.

A program's closure may draw its batch, and an optimizer may move the parameters before it asks. So nothing is evaluated
beforehand. Where the first evaluation overflows and nothing was moved yet, the step is given up within it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoamp.stepping.guard import GivenUp, StepGuard, versions_of

__all__ = ["step_unaware"]


def step_unaware(
    guard: StepGuard,
    closure: Callable[[], Any],
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step an optimizer with a closure that runs passes which `AutoScale` scales. Returns what the step returns.

    Gradients of an overflowed pass are 0. A later evaluation of a step, as LBFGS has them, is repeated at lower scales.
    """
    blamed = guard.settle()
    if blamed is not None:
        guard.skip(blamed)
        return guard.call(closure)
    versions = versions_of(guard.params())
    evaluations = 0

    def evaluate() -> Any:
        nonlocal evaluations
        evaluations += 1
        first = evaluations == 1 and versions == versions_of(guard.params())
        loss, blamed = guard.evaluate(closure, attempts=1 if first else None)
        if first and blamed is not None:
            raise GivenUp(loss, blamed)
        if blamed is not None:
            # What overflowed is 0 in the gradients, and an optimizer may take that for a minimum.
            raise guard.hopeless(blamed)
        return loss

    return guard.take_with(evaluate, original, args, kwargs)
