"""What casts the arguments of a call: built for one dtype and device type, called with all arguments at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.casting.cache import CastCache
from autoamp.tensors import CASTABLE_LAYOUTS, HALF_DTYPES, PLAIN_TYPES, iter_tensors, map_tensors
from autoamp.torch_private import is_any_autocast_enabled, trace_as

CASTABLE_DTYPES = frozenset({*HALF_DTYPES, torch.float32})
"""The dtypes of the tensors that are cast."""

_TENSORS = frozenset({Tensor, Parameter})


CastArgs = Callable[..., Sequence[Any]]
"""Casts a sequence of arguments, however nested, into a new one; returns the same object where nothing is cast.

With ``shares=False``, as second argument, an activation is cast anew and its cast is not kept.
"""


def build_caster(
    target: torch.dtype, convert: Callable[[Tensor], Tensor], device_type: str, cache: CastCache | None
) -> CastArgs:
    """Build the function that casts arguments to one dtype. Most patched calls go through it, so it calls little.

    Args:
        target: The dtype.
        convert: Casts one tensor to it.
        device_type: The type of the devices whose tensors are cast.
        cache: Keeps casts of parameters, and of the last activation; None to keep none.
    """
    castable, strided, plain = CASTABLE_DTYPES, torch.strided, PLAIN_TYPES
    # Reading these attributes takes a third of the time of ``tensor.device.type``.
    on_cpu, on_cuda = device_type == "cpu", device_type == "cuda"
    any_autocast, autocast_rules = is_any_autocast_enabled, torch.is_autocast_enabled
    local: Any = None if cache is None else cache.local
    cached: Any = None if cache is None else cache.cast
    cast_activation: Any = None if cache is None else cache.cast_activation

    def cast_traced(args: Sequence[Any], shares: bool = True) -> Sequence[Any]:
        # A compiler shares casts within its graph.
        return args if any_autocast() and autocast_rules(device_type) else _cast_all(args, target, convert, device_type)

    @trace_as(cast_traced)
    def cast_args(args: Sequence[Any], shares: bool = True) -> Sequence[Any]:
        # In an autocast region of this device type torch casts.
        if any_autocast() and autocast_rules(device_type):
            return args
        param_casts, pins, new = None, None, None
        if cache is not None:
            param_casts, pins = local.param_casts, cache.pins
        for place, arg in enumerate(args):
            kind = type(arg)
            if kind is Tensor or kind is Parameter or (kind not in plain and isinstance(arg, Tensor)):
                dtype = arg.dtype
                if dtype is target or dtype not in castable:
                    continue
                if not (arg.is_cpu if on_cpu else arg.is_cuda if on_cuda else arg.device.type == device_type):
                    continue
                if arg.layout is not strided and arg.layout not in CASTABLE_LAYOUTS:
                    common = dtype_with_sparse(iter_tensors(args), target)
                    return _cast_all(args, common, convert if common is target else Tensor.float, device_type)
                if kind is Parameter and (
                    (param_casts is not None and id(arg) in param_casts) or (pins and id(arg) in pins)
                ):
                    cast = cached(arg, convert)
                elif kind is Tensor and shares and param_casts is not None and arg.requires_grad:
                    cast = cast_activation(arg, convert)
                else:
                    if kind is Parameter and param_casts is not None:
                        # Most are used once in a module call. From the second use on the cast is kept.
                        param_casts[id(arg)] = None
                    cast = convert(arg)
            elif kind in plain:
                continue
            elif (kind is list or kind is tuple) and all(type(item) in _TENSORS for item in arg):
                # Usually the weights of a recurrent layer, or its states.
                cast = cast_args(arg, shares)
                cast = tuple(cast) if kind is tuple else cast
            else:
                cast = map_tensors(arg, lambda tensor: cast_args((tensor,), shares=False)[0])
            if new is None:
                new = list(args)
            new[place] = cast
        return args if new is None else new

    return cast_args


def _cast_all(
    args: Sequence[Any], target: torch.dtype, convert: Callable[[Tensor], Tensor], device_type: str
) -> Sequence[Any]:
    """Cast the arguments of a call whatever their layout, for one that is sparse, and for Dynamo.

    Dynamo refuses to read layouts in the backward of a custom function, and takes no sparse tensors.
    """

    def cast(tensor: Tensor) -> Tensor:
        dtype = tensor.dtype
        is_cast = dtype is not target and dtype in CASTABLE_DTYPES and tensor.device.type == device_type
        return convert(tensor) if is_cast else tensor

    return [map_tensors(arg, cast) for arg in args]


def dtype_with_sparse(tensors: Iterable[Tensor], target: torch.dtype) -> torch.dtype:
    """Return what the arguments of a call become, one of which is sparse: fp32, but for one sparse COO matrix.

    torch has no half kernels for two sparse factors and for batches, nor on CPUs for the compressed layouts. The
    cast of a sparse matrix cannot pass a dense gradient back, which `torch.mm` gives it.
    """
    sparse = [tensor for tensor in tensors if tensor.layout not in CASTABLE_LAYOUTS]
    is_matrix = len(sparse) == 1 and sparse[0].layout is torch.sparse_coo and sparse[0].dim() == 2
    return target if is_matrix and not sparse[0].requires_grad else torch.float32


def cast_call(cast_args: CastArgs, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Cast the arguments of a call, by position and by name."""
    if not kwargs:
        return cast_args(args), kwargs
    given = (*args, *kwargs.values())
    new = cast_args(given)
    if new is given:
        return args, kwargs
    return new[: len(args)], dict(zip(kwargs, new[len(args) :], strict=True))
