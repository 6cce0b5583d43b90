"""Which gradients were checked for inf and nan, so that a write since then shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from autoamp.scaling import local_of
from autoamp.tensors import version_of

__all__ = ["CheckedGrads", "is_same_gradient", "mark_of"]

Mark = tuple[TensorWeakRef, Any]


def mark_of(gradient: Tensor) -> Mark:
    """Return what tells this gradient, with these values, from any other: the object and its version.

    Writes that torch does not count go unseen: through ``.data``, through numpy, and in-place collectives. The object
    is referred to weakly, since an id is used again.
    """
    return TensorWeakRef(gradient), _version(gradient)


def is_same_gradient(mark: Mark | None, gradient: Tensor) -> bool:
    """Whether a gradient is the one of the mark, and was not written to since."""
    return mark is not None and mark[0]() is gradient and mark[1] is not None and mark[1] == _version(gradient)


def _version(gradient: Tensor) -> Any:
    if type(gradient) is Tensor:
        return version_of(gradient)
    # A write to the local part of a DTensor counts there, and one to the whole counts in the DTensor.
    return version_of(gradient), version_of(local_of(gradient))


class CheckedGrads:
    """The gradients of one optimizer that were checked, as they were then."""

    def __init__(self) -> None:
        self._marks: dict[int, Mark] = {}

    def note(self, params: Iterable[Tensor]) -> None:
        """Take note that the gradients of these parameters were checked as they are now."""
        self._marks.update((id(param), mark_of(param.grad)) for param in params if param.grad is not None)

    def unchecked(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradients were not checked, or were written to or replaced since."""
        get = self._marks.get
        return [p for p in params if p.grad is not None and not is_same_gradient(get(id(p)), p.grad)]
