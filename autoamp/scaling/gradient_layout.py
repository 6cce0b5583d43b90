"""Whether tensors are like earlier ones in type, dtype, device, sizes and strides, told in one call for all of them.

The gradients of a step are like those of the step before, as a rule. To look at a dtype, a device, strides and more of
each costs four sweeps over all of them. What torch's compiler asks its arguments before each call of compiled code
tells the same at a quarter of the price, as long as nothing has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from autoamp.torch_private import TENSOR_GUARDS, negated_view

__all__ = ["GradientLayout"]

_Value = TypeVar("_Value")

# To learn costs more than a few sweeps. After so many times, tensors that changed again are not learnt.
_LESSONS = 8


class GradientLayout(Generic[_Value]):
    """Remembers a value that follows from what tensors are like. It keeps no tensor alive.

    Tensors are like those that were learnt if they are as many, of the same type, dtype, device, layout, sizes and
    strides, each as the one in its place; if none comes twice; and if none is an inference tensor, a lazy negation or
    conjugation, or requires a gradient while gradients are recorded, where that one was not.
    """

    def __init__(self) -> None:
        self._value: _Value | None = None
        self._count = 0
        self._lessons = _LESSONS
        self._check: Callable[..., bool] | None = None

    def recall(self, tensors: Sequence[Tensor]) -> _Value | None:
        """Return the value that was learnt for tensors like these; None also where that cannot be told."""
        check = self._check
        return self._value if check is not None and len(tensors) == self._count and check(*tensors) else None

    def learn(self, tensors: Sequence[Tensor], value: _Value) -> None:
        """Take note that ``value`` follows from what these tensors are like, once as many have come twice in a row."""
        again = len(tensors) == self._count
        self._check, self._count = None, len(tensors)
        # In inference mode all tensors look like inference tensors, and nothing that was learnt outside is known.
        if again and self._lessons and not torch.is_inference_mode_enabled() and set(map(type, tensors)) == {Tensor}:
            self._lessons -= 1
            # Tensors without strides have no check, nor has another torch; and the program's own modes may object.
            with contextlib.suppress(AttributeError, TypeError, RuntimeError):
                if _tells_differences():
                    self._check, self._value = _check_of(tensors), value


def _check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    sizes, strides = [list(tensor.size()) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    check: Callable[..., bool] = TENSOR_GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def _tells_differences() -> bool:
    """Tell whether the check sees here and now all that it should: it is no public function of torch."""
    first, second = (torch.zeros(2, 2, dtype=torch.float32, device="cpu") for _ in range(2))
    with torch.inference_mode():
        inference = torch.zeros_like(second)
    others = [
        first,
        inference,
        second.half(),
        second.to("meta"),
        second.to_sparse(),
        second.t(),
        second[:1].expand(2, 2),
        second[:1],
        negated_view(second),
        torch.nn.Parameter(second),
        second.clone().requires_grad_(),
    ]
    check = _check_of([first, second])
    with torch.enable_grad():
        return check(second, first) and not any(check(first, other) for other in others)
