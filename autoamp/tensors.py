"""The dtypes, layouts and types that casts are about, the defaults of a device, and a walk over nested arguments."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes that the policy `fp16` may cast to: the handle's half dtype is one of them."""

CASTABLE_LAYOUTS = frozenset({torch.strided, torch.jagged})
"""The layouts that are cast. Sparse tensors are not: few of their kernels exist in half precision."""

PLAIN_TYPES = frozenset({int, float, bool, str, complex, type(None), torch.Size, torch.dtype, torch.device})
"""Types of which no value contains a tensor. Most arguments are of these, and one look-up tells."""

MAX_DEPTH = 64
"""How deep nested containers are searched for tensors."""


_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_dtype_of, _layout_of, _is_cpu = map(operator.attrgetter, ("dtype", "layout", "is_cpu"))


def are_dense_fp32(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether all are torch's own dense fp32 tensors on a device, in sweeps that hundreds of them do not slow."""
    if not (
        _PLAIN.issuperset(map(type, tensors))
        and {torch.float32}.issuperset(map(_dtype_of, tensors))
        and {torch.strided}.issuperset(map(_layout_of, tensors))
    ):
        return False
    if device.type == "cpu":
        return all(map(_is_cpu, tensors))
    # A device's number is faster to get than the device. One without memory has that of a CPU, which is none.
    return tensors[0].device == device and {device.index}.issuperset(map(Tensor.get_device, tensors))


def without_grad(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that does what this one does under `torch.no_grad`, which as a decorator takes longer.

    For what is called several times in each step, mostly where no gradients are recorded already.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        torch.set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_grad_enabled(True)

    return call


def default_device_type() -> str:
    """Return the type of the current accelerator, ``"cpu"`` where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured: operators are recorded, nothing is computed, and no value can be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype as ``"float16"``, which reports and command lines have."""
    return str(dtype).removeprefix("torch.")


def map_tensors(value: Any, convert: Callable[[Tensor], Any], other: Callable[[Any], Any] | None = None) -> Any:
    """Apply ``convert`` to every tensor in nested tuples, named tuples, lists and dicts, and ``other`` to other leaves.

    Containers are never written to, so that no caller's argument changes. One in which nothing changed is returned as
    it is; any other is built anew, of the same type where that type can be built from its items, else as a plain list
    or tuple. What is deeper than `MAX_DEPTH` stays as it is: a container may contain itself.
    """
    return _mapped(value, convert, other, MAX_DEPTH)[0]


def _mapped(
    value: Any, convert: Callable[[Tensor], Any], other: Callable[[Any], Any] | None, depth: int
) -> tuple[Any, bool]:
    """Return the mapped value and whether it changed.

    Callers cannot tell the latter by ``is``: Dynamo traces that for tensors, and not for containers.
    """
    if isinstance(value, Tensor):
        new = convert(value)
        return new, new is not value
    if depth == 0:
        return value, False
    if isinstance(value, (list, tuple, dict)):
        items, any_changed = [], False
        for item in value.values() if isinstance(value, dict) else value:
            new, changed = (item, False) if type(item) in PLAIN_TYPES else _mapped(item, convert, other, depth - 1)
            items.append(new)
            any_changed |= changed
        return (_rebuilt(value, items), True) if any_changed else (value, False)
    if other is None:
        return value, False
    new = other(value)
    return new, new is not value


def iter_tensors(value: Any, depth: int = MAX_DEPTH) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and dicts, depth first, and none from below ``depth``."""
    if isinstance(value, Tensor):
        yield value
    elif depth > 0 and isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_tensors(item, depth - 1)
    elif depth > 0 and isinstance(value, dict):
        for item in value.values():
            yield from iter_tensors(item, depth - 1)


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """Return a container like ``value`` with other items."""
    kind = type(value)
    if isinstance(value, dict):
        # A copy has what a subclass adds, such as a default factory or attributes. Some subclasses refuse `update`.
        rebuilt = {} if kind is dict else copy.copy(value)
        for key, item in zip(value, items, strict=True):
            rebuilt[key] = item
        return rebuilt
    if kind is list:
        return items
    if kind is tuple:
        return tuple(items)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*items)
    # Named tuples apart, subclasses such as torch.return_types are made of one iterable. Some need more arguments.
    try:
        return kind(items)
    except TypeError:
        return items if isinstance(value, list) else tuple(items)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one dtype into one tensor of one dimension. A single contiguous one is not copied."""
    parts = [tensor.reshape(-1) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of such a tensor, in the shapes of the tensors that are given."""
    sizes = [tensor.numel() for tensor in tensors]
    parts = flat[: sum(sizes)].split(sizes)
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
