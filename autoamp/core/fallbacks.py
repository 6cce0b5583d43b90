"""Calls that are torch's own until torch refuses their dtypes: then they are made once more, with other dtypes.

So a call that torch takes costs one Python frame and gives the same bits as without autoamp. torch checks dtypes before
it writes to an argument or draws a random number. A compiler does not run the call, so traced code decides by the
dtypes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoamp.core.casts import CASTABLE_DTYPES, CastState, dtype_with_sparse
from autoamp.core.rules import CastPolicy
from autoamp.core.threads import ThreadState, TracedMode
from autoamp.tensors import CASTABLE_LAYOUTS, iter_tensors, map_tensors

# Not every exception: torch ends a checkpoint's recomputation by one of its own.
_REFUSALS = RuntimeError, TypeError, ValueError

FALLBACKS = frozenset({CastPolicy.HALF_IF_MIXED, CastPolicy.FP32_IF_REFUSED})
"""The policies of these calls."""

Retry = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Calls a function with the arguments in other dtypes; NotImplemented where their dtypes give no reason to."""


def build_retry(policy: CastPolicy, original: Any, functional: Any) -> Retry:
    """Build what makes a call again.

    Args:
        policy: One of `FALLBACKS`.
        original: What is called. What it writes to, as an in-place form or with ``out=``, keeps its dtype.
        functional: For an in-place form the out-of-place function that computes the same.
    """
    name = getattr(original, "__name__", "")
    writes_first = functional is not None or name == "__setitem__" or (name[-1:] == "_" and name[-2:] != "__")
    to_half = policy is CastPolicy.HALF_IF_MIXED

    def retry(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [one for one in iter_tensors((args, kwargs)) if one.dtype in CASTABLE_DTYPES]
        target = _half_of(tensors)
        if target is None or (to_half and all(one.dtype is target for one in tensors)):
            return NotImplemented
        written: Any = args[0] if writes_first and args else kwargs.get("out")
        if not to_half:
            target = torch.float32
        elif isinstance(written, Tensor):
            target = written.dtype
        elif any(one.layout not in CASTABLE_LAYOUTS for one in tensors):
            target = dtype_with_sparse(tensors, target)
        new_args, new_kwargs = map_tensors(
            (args, {key: value for key, value in kwargs.items() if key != "out"}),
            lambda one: one.to(target) if one.dtype in CASTABLE_DTYPES and one is not written else one,
        )
        if not to_half and writes_first:
            return written.copy_(functional(new_args[0].to(target), *new_args[1:], **new_kwargs))
        return call(*new_args, **new_kwargs, **({"out": kwargs["out"]} if "out" in kwargs else {}))

    return retry


def _half_of(tensors: list[Tensor]) -> torch.dtype | None:
    """Return the half dtype among tensors; None where there is none, or both are."""
    found: torch.dtype | None = None
    for one in tensors:
        if one.dtype is not torch.float32:
            if found is not None and found is not one.dtype:
                return None
            found = one.dtype
    return found


def build_fallback(call: Callable[..., Any], retry: Retry, casts: CastState, active: Any) -> Callable[..., Any]:
    """Build the replacement of a function under one of `FALLBACKS`.

    Args:
        call: What it calls first.
        retry: Makes a call that torch has refused again.
        casts: The casts of the handle.
        active: What `ThreadMode.on` is where the rule acts.
    """
    local, compiling = casts.local, torch.compiler.is_compiling
    traced = build_traced_fallback(call, retry, local, active)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        try:
            # Where torch.export traces, a refused call would stay in the graph.
            return traced(*args, **kwargs) if compiling() else call(*args, **kwargs)
        except _REFUSALS as refusal:
            if local.mode.on is not active:
                raise
            try:
                result = retry(call, args, kwargs)
            except Exception as error:
                # What is wrong beside the dtypes, such as a shape.
                error.__suppress_context__ = True
                casts.explain(error)
                raise
            if result is NotImplemented:
                casts.explain(refusal)
                raise
            return result

    return replacement


def build_traced_fallback(
    call: Callable[..., Any], retry: Retry, local: ThreadState | TracedMode, active: Any
) -> Callable[..., Any]:
    """Build what a compiler traces in place of `build_fallback`'s replacement. It decides by the dtypes alone."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        result = retry(call, args, kwargs) if local.mode.on == active else NotImplemented
        return call(*args, **kwargs) if result is NotImplemented else result

    return traced
