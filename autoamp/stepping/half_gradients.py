"""Gradients that stay in half precision until the optimizer reads them, and steps that widen them part by part.

An fp32 copy of all gradients is two more passes over memory and four bytes for each parameter. Nobody needs it where
the optimizer alone reads gradients. So between a block and the step the half parameter keeps what backward left, and
its master is of the class `LeftHalf`: whoever reads ``master.grad`` gets it in fp32 all the same, for at the first look
all of the optimizer's gradients are widened. If nobody looks, the step widens a part of them at a time, small enough
to stay in the processor's cache, steps that part and copies it down.

Gradients that are scaled still wait in the same way, once they were looked through for inf and nan. What the half
parameter has in ``.grad`` is of the class `ScaledHalf` then: any use of it by torch widens and unscales it first, and
all others with it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.scaling import Factor, limit_of, multiply_, widened
from autoamp.tensors import HALF_DTYPES, iter_tensors

__all__ = [
    "LeftHalf",
    "ScaledHalf",
    "as_they_are",
    "awaited",
    "conceal",
    "is_scaled",
    "leave",
    "parts_of_groups",
    "raw_grad",
    "reads_half",
    "register",
    "reveal",
    "settle",
    "steps_by_parts",
    "true_values",
]

# Optimizers that step each parameter by itself, so that some of them can be stepped, and then the others.
_BY_PARAMETER = frozenset(
    {
        *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW),
        *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
        torch.optim.SGD,
    }
)

# For each master its half parameter, and what widens; not its attribute, which copies and pickles would have.
_homes: Any = WeakIdKeyDictionary()


# Returns what torch has as the gradient of a tensor of any class.
_GRAD: Any = Tensor.grad
raw_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__

# By this attribute a gradient of the class `ScaledHalf` has what widens it and all others, and its factor.
_WAITING = "_autoamp_waiting"
# What may be asked of a gradient that waits: it is the same before and after.
_HARMLESS = frozenset(getattr(Tensor, name).__get__ for name in ("_version", "device", "layout", "shape"))


class LeftHalf(Tensor):
    """The class of a master while the gradient of its half parameter waits to be widened. No object is made of it."""

    # As for parameters: results are plain tensors, and nothing is dispatched in Python.
    __torch_function__ = torch.nn.Parameter.__torch_function__

    @property
    def grad(self) -> Tensor | None:
        """The gradient in fp32. The first look at one widens those of all masters of the optimizer."""
        return awaited(self).grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        half = _homes[self][0]()
        settle(self)
        # The half parameter follows when it is looked at next, as after a write to any master.
        self.grad = value
        if half is not None:
            half.grad = None

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: Any) -> Any:
        return awaited(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return awaited(self).__reduce_ex__(protocol)


class ScaledHalf(Tensor):
    """The class of a half gradient that waits and is scaled still. No object is made of it.

    The first use of one by a function of torch gives it, and all others that wait, its fp32 value without the scale.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with true gradients."""
        waiting = [tensor for tensor in iter_tensors((args, kwargs)) if type(tensor) is ScaledHalf]
        if func in _HARMLESS:
            with as_they_are(waiting):
                return func(*args)
        for gradient in waiting:
            reveal(gradient)
        return func(*args, **(kwargs or {}))


def conceal(gradients: Iterable[Any], widen: weakref.WeakMethod[Callable[[], None]], factor: Factor) -> None:
    """Let scaled half gradients be of the class `ScaledHalf`.

    Args:
        gradients: Plain tensors.
        widen: Widens all gradients that wait, these among them.
        factor: What makes true gradients of them.
    """
    for gradient in gradients:
        setattr(gradient, _WAITING, (widen, factor))
        gradient.__class__ = ScaledHalf


@contextlib.contextmanager
def as_they_are(gradients: Sequence[Any]) -> Iterator[None]:
    """Let gradients of the class `ScaledHalf` be plain tensors within a ``with`` statement, scaled as they are."""
    for gradient in gradients:
        gradient.__class__ = Tensor
    try:
        yield
    finally:
        for gradient in gradients:
            if hasattr(gradient, _WAITING):
                gradient.__class__ = ScaledHalf


def is_scaled(gradient: Any) -> bool:
    """Tell whether a gradient waits with its scale."""
    return hasattr(gradient, _WAITING)


@torch.no_grad()
def reveal(gradient: Any) -> None:
    """Let one gradient of the class `ScaledHalf` be a plain tensor with its fp32 value, and with it all that wait."""
    method, factor = getattr(gradient, _WAITING)
    widen = method()
    if widen is not None:
        widen()
    if type(gradient) is ScaledHalf:
        # Nobody has it in ``.grad`` any more.
        true_values([gradient], factor)


@torch.no_grad()
def true_values(gradients: Sequence[Any], factor: Factor) -> None:
    """Let gradients of the class `ScaledHalf` be plain tensors with their fp32 values, the same objects."""
    for gradient in gradients:
        gradient.__class__ = Tensor
        delattr(gradient, _WAITING)
    for gradient, wide in zip(gradients, widened(gradients), strict=True):
        gradient.data = wide
    multiply_(gradients, factor)


def register(half: Tensor, master: Tensor, widen: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Prepare a half parameter and its master for `leave`; not for shards and the like, whose gradients never wait.

    Args:
        half: The half parameter, referred to weakly.
        master: Its master.
        widen: Widens the gradients of this and all others that wait.
    """
    if type(master) is Tensor:
        # Some optimizers read half gradients.
        master.grad_dtype = None
        _homes[master] = (weakref.ref(half), widen)


def leave(half: Tensor, master: Tensor) -> bool:
    """Let the gradient of a half parameter wait, if it is half, dense and a plain tensor. Tells whether it does.

    The half parameter keeps it, and the gradient of the master is None.
    """
    grad: Any = half.grad
    if (
        type(grad) is not Tensor
        or type(master) is not Tensor
        or grad.dtype not in HALF_DTYPES
        or grad.layout is not torch.strided
        or master.grad_dtype is not None
        or master.shape != grad.shape
    ):
        return False
    master.__class__ = LeftHalf
    return True


def settle(master: Tensor) -> None:
    """Let a master be a plain tensor again, without a gradient."""
    master.__class__ = Tensor


def awaited(master: Any) -> Tensor:
    """Return a master with its gradient in fp32: it is a plain tensor then, and so are all others that waited."""
    reference, method = _homes[master]
    half, widen = reference(), method()
    if widen is not None:
        widen()
    if type(master) is LeftHalf:
        # The optimizer is gone, or steps this master no longer.
        settle(master)
        grad = None if half is None else half.grad
        if half is not None and grad is not None:
            if type(grad) is ScaledHalf:
                reveal(grad)
            half.grad = master.grad = grad.float()
    return master  # type: ignore[no-any-return]


def steps_by_parts(optimizer: Any) -> bool:
    """Tell whether some of an optimizer's parameters can be stepped, and then the others: a class of torch itself."""
    return type(optimizer) in _BY_PARAMETER


def reads_half(optimizer: Any) -> bool:
    """Tell whether an optimizer's own arithmetic takes half gradients of fp32 parameters.

    Its very class says so, by ``reads_half_gradients = True``: the step of a class derived from it may be another. It
    has a ``half_factor`` while it steps, by which half gradients are to be multiplied; None for 1.
    """
    return bool(vars(type(optimizer)).get("reads_half_gradients"))


def parts_of_groups(
    groups: Sequence[dict[str, Any]], without: Collection[int] = ()
) -> Iterator[list[tuple[dict[str, Any], list[Tensor]]]]:
    """Yield parts of an optimizer's parameters, each as some of its groups with some parameters of each.

    A part has as many elements of gradients that wait as are widened at a time, or one such parameter. Parameters whose
    ids are in ``without`` are left out.
    """
    part: list[tuple[dict[str, Any], list[Tensor]]] = []
    total = sum(param.numel() for group in groups for param in group["params"] if type(param) is LeftHalf)
    room, on_cpu, elsewhere = 0, limit_of(total, on_cpu=True), limit_of(total, on_cpu=False)
    for group in groups:
        taken: list[Tensor] = []
        for param in group["params"]:
            if id(param) in without:
                continue
            size = param.numel() if type(param) is LeftHalf else 0
            limit = on_cpu if param.is_cpu else elsewhere
            if room and size and room + size > limit:
                yield [*part, (group, taken)] if taken else part
                part, taken, room = [], [], 0
            taken.append(param)
            room += size
        if taken:
            part.append((group, taken))
    if part:
        yield part
