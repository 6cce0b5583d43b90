"""Ops of torch that write to what they are given: in-place forms, ``out=``, statistics of norms and the like.

A cast makes a copy, and what the op writes to a copy is lost. This file knows which arguments these are, and makes the
calls that leave them uncast, or copy back what was written.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoamp.core.casts import CastArgs, CastState, cast_call
from autoamp.tensors import iter_tensors, map_tensors
from autoamp.torch_private import schema_of

_STATISTICS = ("running_mean", "running_var")
_IN_PYTHON = {
    "batch_norm": _STATISTICS,
    "embedding": ("weight",),  # where max_norm= is given
    "embedding_bag": ("weight",),
    "instance_norm": _STATISTICS,
}
# Builtins whose schema tells what they write to: that of norms is silent.
_BY_SCHEMA = frozenset({"fused_moving_avg_obs_fake_quant"})


@dataclass(frozen=True, slots=True)
class Mutation:
    """What a function writes to.

    Attributes:
        parameters: The names of its parameters, in order.
        mutated: Those that it writes to, and that are cast for the call.
        uncast: Those that are never cast: what a method such as `Tensor.normal_` is there to write to.
        inplace: Whether it has a flag `inplace` that makes it write to its first argument.
    """

    parameters: tuple[str, ...]
    mutated: frozenset[str] = frozenset()
    uncast: frozenset[str] = frozenset()
    inplace: bool = False


def mutation_of(original: Any) -> Mutation | None:
    """Return what a function or method of torch writes to, None where that is nothing.

    In-place forms that have an out-of-place function beside them are not asked for here: they compute with that.
    """
    name = getattr(original, "__name__", "")
    in_python = isinstance(original, types.FunctionType)
    if in_python and not original.__module__.startswith("torch."):
        return None
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return Mutation(("self",), uncast=frozenset({"self"}))
    if not in_python:
        may_write = name.endswith(("_norm", "_counts", "_stats")) or name in _BY_SCHEMA
        op: Any = getattr(torch.ops.aten, name, None) if may_write else None
        arguments = schema_of(op.default).arguments if hasattr(op, "default") else ()
        mutated = {one.name for one in arguments if one.is_write or one.name in _STATISTICS}
        return Mutation(tuple(one.name for one in arguments), frozenset(mutated)) if mutated else None
    parameters = original.__code__.co_varnames[: original.__code__.co_argcount]
    if "inplace" in parameters:
        return Mutation(parameters, inplace=True)
    return Mutation(parameters, frozenset(_IN_PYTHON[name])) if name in _IN_PYTHON else None


def build_inplace(original: Any, functional: Any, cast_args: CastArgs) -> Callable[..., Any]:
    """Build the cast call of an in-place form: self keeps its dtype, and the value is computed as the list says.

    Args:
        original: The in-place form.
        functional: The function that computes the same out of place.
        cast_args: Casts arguments as the list says.
    """

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if not args:
            return original(*args, **kwargs)
        new, new_kwargs = cast_call(cast_args, args, kwargs)
        if new[0] is args[0]:
            return original(*new, **new_kwargs)
        value = functional(*new, **new_kwargs)
        # Where they do not fit, torch's own form grows self or says in its own words why it cannot.
        return args[0].copy_(value) if value.shape == args[0].shape else original(*args, **kwargs)

    return run


def build_mutating(
    original: Any, cast_args: CastArgs, casts: CastState, mutation: Mutation, *, to_half: bool
) -> Callable[..., Any]:
    """Build the cast call of a function that writes to its arguments.

    Args:
        original: The function, called once.
        cast_args: Casts arguments as the list says; what is not to be cast comes back as the same object.
        casts: The casts of the handle.
        mutation: What the function writes to.
        to_half: Whether the cast is one to half: what is mutated then stays in its own, wider dtype. A cast to
            fp32 is copied back after the call.
    """
    uncast, parameters, narrows = mutation.uncast, mutation.parameters, to_half and bool(mutation.mutated)
    if narrows:
        # Of a norm the weights too, since they go with its statistics.
        uncast = mutation.mutated | {"weight", "bias"}

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        new, new_kwargs = cast_call(cast_args, args, kwargs)
        # Both by the names of the parameters; arguments beyond these stay by position.
        given, call = dict(zip(parameters, args, strict=False)) | kwargs, dict(zip(parameters, new, strict=False))
        call |= new_kwargs
        first = parameters[0]
        if mutation.inplace and given.get("inplace") and call.get(first) is not given.get(first):
            # As an in-place form, the first argument keeps its dtype.
            return given[first].copy_(original(**{**call, "inplace": False}))
        call.update({name: given[name] for name in uncast & given.keys()})
        values = [call[name] for name in parameters[: len(args)]]
        result = original(*values, *new[len(values) :], **{name: call[name] for name in kwargs})
        for name in mutation.mutated & given.keys():
            if isinstance(given[name], Tensor) and call[name] is not given[name]:
                with torch.no_grad():
                    given[name].copy_(call[name])
        # With an uncast argument in fp32 the result may be fp32 too.
        return map_tensors(result, casts.to_half) if narrows else result

    return run


def into_out(
    original: Any,
    cast_args: CastArgs,
    casts: CastState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    to_half: bool,
) -> Any:
    """Make a call with ``out=``: computed as the list says, then written into ``out`` in its own dtype.

    A product is computed in the dtype of ``out``, as in place: half factors are widened for an fp32 one.
    """
    out, inputs = kwargs["out"], {key: value for key, value in kwargs.items() if key != "out"}
    if to_half:
        if isinstance(out, Tensor) and out.dtype is torch.float32 and casts.eligible(out):
            new, inputs = cast_call(casts.args_to_fp32, args, inputs)
            return original(*new, **inputs, out=out)
        return original(*args, **kwargs)
    tensors, outs = list(iter_tensors((args, kwargs))), list(iter_tensors(out))
    # torch refuses out= where a gradient is required, or where it is no tensor; the error is left to it.
    if not outs or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return original(*args, **kwargs)
    new, new_inputs = cast_call(cast_args, args, inputs)
    pairs = zip(iter_tensors((new, new_inputs)), iter_tensors((args, inputs)), strict=True)
    if (
        all(cast is given for cast, given in pairs)
        and len({tensor.dtype for tensor in tensors if casts.eligible(tensor)}) < 2
    ):
        return original(*args, **kwargs)
    result = original(*new, **new_inputs)
    values = list(iter_tensors(result))
    places = list(zip(outs, values, strict=False))
    fits = all(one.device == value.device and _kind(value.dtype) <= _kind(one.dtype) for one, value in places)
    if len(outs) != len(values) or not fits:
        return original(*args, **kwargs)
    for one, value in places:
        if one.shape != value.shape:
            one.resize_(value.shape)
        one.copy_(value)
    # Of the result's own kind, as torch returns it: a named tuple where there are several.
    written = iter(outs)
    return map_tensors(result, lambda _: next(written))


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    # Orders bool, integer, float, complex as torch.can_cast does, which a compiler does not trace.
    return dtype.is_complex, dtype.is_floating_point, dtype is not torch.bool
