"""What casts the arguments of a call: built for one dtype and device type, called with all arguments at once.

`cast_each`, which `_build_loop` builds, is the loop that each tensor goes through.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.casting.cache import CastCache
from autoamp.casting.threads import ThreadState
from autoamp.tensors import CASTABLE_LAYOUTS, HALF_DTYPES, PLAIN_TYPES, map_tensors
from autoamp.torch_private import is_any_autocast_enabled

__all__ = ["CASTABLE_DTYPES", "CastArgs", "SparseArgument", "build_caster", "cast_call", "on_device"]

CASTABLE_DTYPES = frozenset({*HALF_DTYPES, torch.float32})
"""The dtypes of the tensors that are cast."""


class SparseArgument(Exception):
    """Raised while arguments are cast, where a tensor to be cast is sparse: the call is to be made with none cast."""


CastArgs = Callable[..., Sequence[Any]]
"""Casts a sequence of arguments, however nested, into a new one; what needs no cast comes back as the same object.

With ``shares=False``, as second argument, an activation is cast anew and its cast is not kept. Raises `SparseArgument`.
"""


def on_device(device_type: str) -> Callable[[Tensor], bool]:
    """Return a test whether a tensor is on a device of this type.

    Tensors have an attribute for some types, which takes a third of the time of the comparison. The tests are lambdas
    since compilers cannot trace `operator.attrgetter`. Where little else is asked, in the loop over arguments and in
    the replacements of layers and products, the test is written out: called for each tensor it would take `linear`
    from two Python frames to four, and `einsum` from three to five.
    """
    if device_type == "cuda":
        return lambda tensor: tensor.is_cuda
    if device_type == "cpu":
        return lambda tensor: tensor.is_cpu
    return lambda tensor: tensor.device.type == device_type


def build_caster(
    target: torch.dtype,
    convert: Callable[[Tensor], Tensor],
    device_type: str,
    local: ThreadState,
    cache: CastCache | None,
) -> CastArgs:
    """Build the function that casts arguments to one dtype.

    Args:
        target: The dtype.
        convert: Casts one tensor to it.
        device_type: The type of the devices whose tensors are cast.
        local: Has the casts that this thread's running module call keeps.
        cache: Keeps casts of parameters, and of the last activation; None to keep none.
    """
    cast_each = _build_loop(target, convert, device_type, cache)
    compiling, any_autocast, autocast_rules = (
        torch.compiler.is_dynamo_compiling, is_any_autocast_enabled, torch.is_autocast_enabled,
    )  # fmt: skip
    pins, in_inference_mode = None if cache is None else cache.pins, torch.is_inference_mode_enabled

    def cast_args(args: Sequence[Any], shares: bool = True) -> Sequence[Any]:
        # What is the same for all arguments is asked once.
        if compiling() or any_autocast():
            # A compiler shares casts within its graph. An autocast region of this device type casts by itself.
            return args if any_autocast() and autocast_rules(device_type) else cast_each(args)
        if pins is None:
            return cast_each(args)
        entries = local.entries
        return cast_each(args, entries, pins, shares and entries is not None and not in_inference_mode())

    return cast_args


def _build_loop(
    target: torch.dtype, convert: Callable[[Tensor], Tensor], device_type: str, cache: CastCache | None
) -> Callable[..., list[Any]]:
    """Build the loop over arguments. It tests and casts without calls of helpers, since most calls go through it."""
    sources, here, on_cpu = CASTABLE_DTYPES - {target}, on_device(device_type), device_type == "cpu"
    strided, plain = torch.strided, PLAIN_TYPES
    cached: Any = None if cache is None else cache.cast
    share: Any = None if cache is None else cache.share

    def one_by_one(entries: Any, pins: Any) -> Callable[[Tensor], Tensor]:
        return lambda tensor: cast_each((tensor,), entries, pins)[0]

    def cast_each(args: Sequence[Any], entries: Any = None, pins: Any = None, shares: bool = False) -> list[Any]:
        new = []
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter or (kind not in plain and isinstance(arg, Tensor)):
                dtype = arg.dtype
                if dtype is not target and dtype in sources and (arg.is_cpu if on_cpu else here(arg)):
                    if arg.layout is not strided and arg.layout not in CASTABLE_LAYOUTS:
                        raise SparseArgument
                    if kind is Tensor:
                        arg = share(arg, convert) if shares else convert(arg)
                    elif kind is not Parameter:
                        arg = convert(arg)
                    elif (pins and id(arg) in pins) or (entries is not None and id(arg) in entries):
                        arg = cached(arg, convert)
                    else:
                        if entries is not None:
                            # Most are used once in a module call. From the second use on the cast is kept.
                            entries[id(arg)] = None
                        arg = convert(arg)
            elif kind is list or kind is tuple:
                # Usually the weights of a recurrent layer, or its states: tensors alone.
                for item in arg:
                    if type(item) is not Parameter and type(item) is not Tensor:
                        arg = map_tensors(arg, one_by_one(entries, pins))
                        break
                else:
                    items = cast_each(arg, entries, pins, shares)
                    if any(map(operator.is_not, items, arg)):
                        arg = items if kind is list else tuple(items)
            elif kind not in plain:
                arg = map_tensors(arg, one_by_one(entries, pins))
            new.append(arg)
        return new

    return cast_each


def cast_call(cast_args: CastArgs, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Cast the arguments of a call, by position and by name. SparseArgument where one to be cast is sparse."""
    return cast_args(args), dict(zip(kwargs, cast_args([*kwargs.values()]), strict=True)) if kwargs else kwargs
