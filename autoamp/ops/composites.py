"""Functions within which CUDA's autocast casts, later and less than a cast of their arguments would.

Under the policies fp32 and promote they run with torch's autocast on for the one call, as they do under
`torch.autocast`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.casting import CastState
from autoamp.tensors import HALF_DTYPES, PLAIN_TYPES
from autoamp.torch_private import in_function_mode, is_any_autocast_enabled, tracing_state


def ops_named(*names: str) -> frozenset[Any]:
    """Return what torch's public namespaces have by these names."""
    owners = (torch, Tensor, torch.nn.functional, torch.linalg, torch.special)
    found = (getattr(owner, name, None) for owner in owners for name in names)
    return frozenset(op for op in found if op is not None)


COMPOSITES = ops_named(
    "cross_entropy", "cumulative_trapezoid", "inner", "ldexp", "sum_to_size", "trace", "trapezoid", "trapz"
)


def build_composite(original: Any, casts: CastState) -> Callable[..., Any]:
    """Build the way of one of `COMPOSITES`: torch's autocast is on, with its cache off, and as before afterwards.

    Args:
        original: One of `COMPOSITES`.
        casts: The casts of the handle.
    """

    def run_composite(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [arg for arg in (*args, *kwargs.values()) if type(arg) not in PLAIN_TYPES]
        if (
            "out" in kwargs
            or torch.compiler.is_dynamo_compiling()
            or is_any_autocast_enabled()
            or in_function_mode()
            or tracing_state() is not None
            or not all(type(arg) in (Tensor, Parameter) for arg in given)
            or not any(arg.dtype in HALF_DTYPES for arg in given)
            or not all(casts.eligible(arg) for arg in given if arg.dtype in HALF_DTYPES)
        ):
            return NotImplemented
        return run_in_autocast(casts, original, args, kwargs)

    return run_composite


def run_in_autocast(
    casts: CastState, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function with torch's autocast on, which is off around it, and without its cache of casts.

    Args:
        casts: The casts of the handle, whose half dtype and device type these are.
        function: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    device_type = casts.device_type
    cached, before = torch.is_autocast_cache_enabled(), torch.get_autocast_dtype(device_type)
    try:
        # What promotes within refuses a half dtype that is not autocast's own.
        torch.set_autocast_dtype(device_type, casts.dtype)
        torch.set_autocast_cache_enabled(False)
        torch.set_autocast_enabled(device_type, True)
        return function(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device_type, False)
        torch.set_autocast_cache_enabled(cached)
        torch.set_autocast_dtype(device_type, before)
