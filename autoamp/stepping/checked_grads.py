"""Which gradients were checked for inf and nan, so that a write since then shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from autoamp.scaling import is_sharded
from autoamp.tensors import version_of

Mark = tuple[TensorWeakRef, int | None]


def mark_of(gradient: Tensor) -> Mark:
    """Return what tells this gradient, with these values, from any other: the object and its version.

    Writes that torch does not count go unseen: through ``.data``, through numpy, and in-place collectives. Of a DTensor
    the version is None, since it does not count multi-tensor functions either. The object is referred to weakly, since
    an id is used again.
    """
    return TensorWeakRef(gradient), None if is_sharded(gradient) else version_of(gradient)


def is_same_gradient(mark: Mark | None, gradient: Tensor) -> bool:
    """Whether a gradient is the one of the mark, and was not written to since."""
    return mark is not None and mark[0]() is gradient and mark[1] is not None and mark[1] == version_of(gradient)


class CheckedGrads:
    """The gradients of one optimizer that were checked, as they were then."""

    def __init__(self) -> None:
        self._marks: dict[int, Mark] = {}

    def note(self, params: Iterable[Tensor]) -> None:
        """Take note that the gradients of these parameters were checked as they are now."""
        self._marks.update((id(param), mark_of(param.grad)) for param in params if param.grad is not None)

    def unchecked(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradients were not checked, or were written to or replaced since."""
        get = self._marks.get
        return [p for p in params if p.grad is not None and not is_same_gradient(get(id(p)), p.grad)]
