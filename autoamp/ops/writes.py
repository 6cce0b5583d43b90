"""Mutated arguments: ops of torch that write to what they are given, beside `out=` and the self of an in-place form.

A cast makes a copy, and what the op writes to a copy is lost. This file knows which arguments these are, and builds the
replacement that leaves them uncast, or copies back what was written.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoamp.casting import Casts, SparseArgument
from autoamp.tensors import map_tensors

__all__ = ["Mutation", "build_mutating", "mutation_of"]

_STATISTICS = ("running_mean", "running_var")
_NORM = ("input", "weight", "bias", *_STATISTICS)
# What no signature can be asked for: the parameters of builtins, as far as the last that is mutated.
_BUILTINS = {
    "batch_norm": _NORM,
    "batch_norm_gather_stats": ("input", "mean", "invstd", *_STATISTICS),
    "batch_norm_gather_stats_with_counts": ("input", "mean", "invstd", *_STATISTICS),
    "batch_norm_update_stats": ("input", *_STATISTICS),
    "cudnn_batch_norm": _NORM,
    "instance_norm": _NORM,
    "miopen_batch_norm": _NORM,
    "native_batch_norm": _NORM,
}
_IN_PYTHON = {
    "batch_norm": _STATISTICS,
    "embedding": ("weight",),  # where max_norm= is given
    "embedding_bag": ("weight",),
    "instance_norm": _STATISTICS,
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """What a function writes to.

    Attributes:
        parameters: The names of its parameters, in order.
        mutated: Those that it writes to.
        itself: Whether its first argument is what it is there to write to, as of `Tensor.normal_`: that is never cast.
        inplace: Whether it has a flag `inplace` that makes it write to its first argument.
    """

    parameters: tuple[str, ...]
    mutated: frozenset[str] = frozenset()
    itself: bool = False
    inplace: bool = False

    def uncast(self, to_half: bool) -> frozenset[str]:
        """Return the parameters that are not cast: of a norm the weights too, since they go with its statistics."""
        if self.itself:
            return frozenset(self.parameters[:1])
        if to_half and self.mutated:
            return self.mutated | {"weight", "bias"}
        return frozenset()


def mutation_of(original: Any) -> Mutation | None:
    """Return what a function or method of torch writes to, None where that is nothing.

    In-place forms that have an out-of-place function beside them are not asked for here: they compute with that.
    """
    name = getattr(original, "__name__", "")
    in_python = isinstance(original, types.FunctionType)
    if in_python and not original.__module__.startswith("torch."):
        return None
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return Mutation(("self",), itself=True)
    if not in_python:
        return Mutation(_BUILTINS[name], frozenset(_STATISTICS)) if name in _BUILTINS else None
    parameters = original.__code__.co_varnames[: original.__code__.co_argcount]
    if "inplace" in parameters:
        return Mutation(parameters, inplace=True)
    return Mutation(parameters, frozenset(_IN_PYTHON[name])) if name in _IN_PYTHON else None


def build_mutating(
    original: Any, cast_all: Callable[..., Any], casts: Casts, mutation: Mutation, *, to_half: bool
) -> Callable[..., Any]:
    """Build the replacement of a function that writes to its arguments.

    Args:
        original: The function, called once.
        cast_all: Casts ``args`` and ``kwargs``; what is not to be cast comes back as the same object.
        casts: The state that the replacement reads.
        mutation: What the function writes to.
        to_half: Whether the cast is one to half: what is mutated then stays in its own, wider dtype. A cast to
            fp32 is copied back after the call.
    """
    local, deviations, uncast = casts.local, casts.deviations, mutation.uncast(to_half)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if deviations and not local.on:
            return passed(*args, **kwargs)
        try:
            new, new_kwargs = cast_all(args, kwargs)
        except SparseArgument:
            return original(*args, **kwargs)
        call = _Call(mutation.parameters, list(new), dict(new_kwargs))
        given = _Call(mutation.parameters, list(args), kwargs)
        if mutation.inplace and given.get("inplace"):
            return _in_place(original, given, call)
        for name in uncast:
            call.put(name, given.get(name))
        result = original(*call.args, **call.kwargs)
        for name in mutation.mutated:
            before, after = given.get(name), call.get(name)
            if isinstance(before, Tensor) and after is not before:
                with torch.no_grad():
                    before.copy_(after)
        # With an uncast argument in fp32 the result may be fp32 too.
        return map_tensors(result, casts.to_half) if uncast and not mutation.itself else result

    passed = casts.passing(original, replacement)
    return replacement


def _in_place(original: Any, given: _Call, call: _Call) -> Any:
    """A call with `inplace=True`: as an in-place form, its first argument keeps its dtype."""
    first = given.parameters[0]
    if call.get(first) is given.get(first):
        return original(*call.args, **call.kwargs)
    call.put("inplace", False)
    return given.get(first).copy_(original(*call.args, **call.kwargs))


@dataclass(slots=True)
class _Call:
    """The arguments of one call, by the names of the parameters."""

    parameters: tuple[str, ...]
    args: list[Any]
    kwargs: dict[str, Any]

    def get(self, name: str) -> Any:
        index = self._index(name)
        return self.kwargs.get(name) if index is None else self.args[index]

    def put(self, name: str, value: Any) -> None:
        index = self._index(name)
        if index is not None:
            self.args[index] = value
        elif name in self.kwargs:
            self.kwargs[name] = value

    def _index(self, name: str) -> int | None:
        index = self.parameters.index(name) if name in self.parameters else None
        return index if index is not None and index < len(self.args) else None
