"""`apex.amp.wrap`. What wrote casts into a module there registers the module's functions with the runtime here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from autoamp.compat.amp.utils import casted_args, maybe_float, maybe_half
from autoamp.errors import UsageError
from autoamp.runtime import (
    current_runtime,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

__all__ = ["cached_cast", "make_cast_wrapper", "make_promote_wrapper", "promote", "sequence_promote"]


def cached_cast(
    mod: Any, fn: str, cast_fn: Callable[..., Any], handle: Any, try_caching: bool = False, verbose: bool = False
) -> None:
    """Put ``mod.fn``, if there is one, under the policy `fp16` or `fp32`, now and at each later ``init``.

    Args:
        mod: A module or class.
        fn: The name of a function in it.
        cast_fn: `maybe_half` or `maybe_float` of `apex.amp.utils`.
        handle: No effect.
        try_caching: No effect: the active handle decides which casts are kept.
        verbose: No effect.

    Raises:
        UsageError: ``cast_fn`` is another function.
        TargetError: ``mod.fn`` is nothing that can be patched. It is a ValueError.
    """
    if not hasattr(mod, fn):
        return
    if cast_fn is maybe_half:
        register_half_function(mod, fn)
    elif cast_fn is maybe_float:
        register_float_function(mod, fn)
    else:
        raise UsageError(f"cast_fn={cast_fn!r} is unknown; choose apex.amp.utils.maybe_half or maybe_float")


def promote(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Put ``mod.fn`` under the policy `promote`, which casts arguments to the widest dtype among them.

    ``handle`` and ``verbose`` have no effect. Where there is no ``mod.fn`` nothing is done.

    Raises:
        TargetError: ``mod.fn`` is nothing that can be patched. It is a ValueError.
    """
    if hasattr(mod, fn):
        register_promote_function(mod, fn)


def sequence_promote(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Do what `promote` does: that policy looks into sequences of tensors too."""
    promote(mod, fn, handle, verbose)


def make_cast_wrapper(
    orig_fn: Callable[..., Any], cast_fn: Callable[..., Any], handle: Any, try_caching: bool = False
) -> Callable[..., Any]:
    """Return a function that calls ``orig_fn``, with floating arguments cast by ``cast_fn`` while casts are on.

    ``handle`` and ``try_caching`` have no effect.
    """

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        active = current_runtime()
        if active is None or not active.casts.local.switches.on:
            return orig_fn(*args, **kwargs)
        return orig_fn(*casted_args(cast_fn, args, kwargs), **kwargs)

    return wrapper


def make_promote_wrapper(orig_fn: Callable[..., Any], cast_fn: Any, handle: Any = None) -> Callable[..., Any]:
    """Return a function that calls ``orig_fn``, with floating arguments cast to the widest dtype among them.

    ``cast_fn`` and ``handle`` have no effect.
    """
    return promote_function(orig_fn)
