"""The gradients of one optimizer: their scale, and which of them were checked for inf and nan as they are now."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from autoamp.scaling import LossScaler, Scale, is_sharded
from autoamp.stepping.attach import stepped_params
from autoamp.stepping.masters import MasterWeights
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


class ScaledGrads:
    """The gradients of one optimizer, and their scale.

    Args:
        optimizer: Referred to weakly.
        masters: The masters that it steps in place of half parameters.

    Attributes:
        masters: As given.
        scale: The scale of all gradients now: 1.0 outside blocks but for ``delay_unscale``.
        delayed: The scaler of the block that has left the gradients scaled, if one has.
    """

    def __init__(self, optimizer: weakref.ref[Any], masters: MasterWeights | None) -> None:
        self.masters = masters
        self.scale: Scale = 1.0
        self._optimizer = optimizer
        self.delayed: LossScaler | None = None

    @property
    def optimizer(self) -> Any:
        """The optimizer, None once it is gone."""
        return self._optimizer()

    def params(self) -> Sequence[Tensor]:
        """Return the tensors whose gradients are scaled and unscaled: all that the optimizer steps."""
        return stepped_params(self._optimizer())

    def leaves(self) -> list[Tensor]:
        """Return the tensors whose gradients backward passes make: what the optimizer steps, and half parameters."""
        halves = [] if self.masters is None else [half for half, _ in self.masters.pairs]
        return [*halves, *self.params()]

    def has_any(self) -> bool:
        """Whether any gradient is there."""
        return any(param.grad is not None for param in self.params())

    def collect(self, *, new_pass: bool = False) -> None:
        """Let masters have the gradients that a backward pass left on half parameters; see `MasterWeights.collect`."""
        if self.masters is not None:
            self.masters.collect(new_pass=new_pass)
