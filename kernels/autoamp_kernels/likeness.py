"""Whether tensors are like earlier ones in all that a kernel asks of them, told in one call for all of them.

Gradients are new tensors in each step, and like those of the step before. Their dtypes, devices, sizes and strides are
a sweep each; the check that torch's compiler makes of its arguments tells all of that in the time of one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Likeness"]

# To learn takes longer than the sweeps. Lists that changed so often are not learnt again.
_LESSONS = 8


class Likeness:
    """Tells whether tensors are like those that were learnt. It keeps no tensor alive.

    They are if they are as many, of the same types, dtypes, devices and layouts, of the same sizes and strides, each as
    the one in its place, and if none comes twice.

    Args:
        check: Takes as many tensors as were learnt, and tells; None before any were.
        count: How many that is.
        lessons: How many times others may be learnt in their place.
    """

    def __init__(self, check: Callable[..., bool] | None = None, count: int = 0, lessons: int = _LESSONS) -> None:
        self._check, self._count, self._lessons = check, count, lessons

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether tensors are like those; False also where that cannot be told."""
        check = self._check
        return check is not None and len(tensors) == self._count and check(*tensors)

    def learnt(self, tensors: Sequence[Tensor]) -> Likeness:
        """Return what tells whether others are like these: another object, since threads share this one."""
        if self._lessons and _can_tell() and set(map(type, tensors)) == {Tensor}:
            # Tensors without strides have no such check.
            with contextlib.suppress(RuntimeError, TypeError):
                return Likeness(_check_of(tensors), len(tensors), self._lessons - 1)
        return self.forgotten()

    def forgotten(self) -> Likeness:
        """Return what takes no tensors to be alike until some are learnt."""
        return Likeness(lessons=self._lessons)


def _guards() -> Any:
    """Return the class that makes checks; None where torch has none of that name."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    return TensorGuards


def _check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    sizes, strides = [list(tensor.size()) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    check: Callable[..., bool] = _guards()(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


@functools.cache
def _can_tell() -> bool:
    """Tell whether the check sees all that it should: it is no public function of torch."""
    if _guards() is None:
        return False
    first, second = (torch.zeros(2, 2, dtype=torch.float32, device="cpu") for _ in range(2))
    others = [first, second.half(), second.to("meta"), second.t(), second[:1].expand(2, 2), second[:1], second[:, 0]]
    others += [second.view(4), second.to_sparse(), torch.nn.Parameter(second)]
    try:
        check = _check_of([first, second])
        return check(second, first) and not any(check(first, other) for other in others)
    except (AttributeError, RuntimeError, TypeError):
        return False
