"""Casts to half of matrix products, by torch's own autocast; and functions within which that autocast casts.

Autocast casts in C++, faster than Python can. It is on for the one call, under the policy that it has for the op
anyway. Its own cache of casts, which does not see a weight change, is off meanwhile; a parameter that is used again
within a module call is cast by `CastCache`. Layers have a quicker way, in `autoamp.ops.layers`, and come here with what
does not fit it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.casting import Casts, on_device
from autoamp.ops.layers import SPECIAL_CASES, build_layer
from autoamp.tensors import HALF_DTYPES, PLAIN_TYPES

__all__ = ["BUILTINS", "COMPOSITES", "HALF_OPS", "build_composite", "build_to_half"]

BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_NAMES = (
    "__matmul__", "addbmm", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "linear", "matmul", "mm",
)  # fmt: skip
_COMPOSITES = (
    "cross_entropy", "cumulative_trapezoid", "inner", "ldexp", "sum_to_size", "trace", "trapezoid", "trapz",
)  # fmt: skip
_PRODUCTS = frozenset({"__matmul__", "bmm", "matmul", "mm"})
_SWITCHES = torch.set_autocast_enabled, torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled
# No op above takes a tensor within a tuple or list.
_SKIPPED = PLAIN_TYPES | {tuple, list}

HALF_OPS = frozenset(
    op
    for owner in (torch, Tensor, torch.nn.functional)
    for op in (getattr(owner, name, None) for name in _NAMES)
    if isinstance(op, BUILTINS)
)
"""Ops that return one tensor, draw no random numbers, and that autocast runs in half on a CPU and on CUDA."""

COMPOSITES = frozenset(
    op
    for owner in (torch, Tensor, torch.nn.functional)
    for name in _COMPOSITES
    if (op := getattr(owner, name, None)) is not None
)
"""Functions within which CUDA's autocast casts, later and less than a cast of their arguments would."""


def _build_product(original: Any, general: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """A product of two matrices, as a rule activations; parameters go to ``general``."""
    local, deviations = casts.local, casts.deviations
    target, full, strided, on_cpu = casts.dtype, torch.float32, torch.strided, casts.device_type == "cpu"
    compiling, any_autocast, in_function_mode, trace = SPECIAL_CASES
    call = _under_autocast(original, general, casts)
    device_type, usual = casts.device_type, torch.get_autocast_dtype(casts.device_type) is target
    switch, switch_cache, caches = _SWITCHES

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 2 or (deviations and not local.on):
            return general(*args, **kwargs)
        one, other = args
        if type(one) is not Tensor or type(other) is not Tensor:
            return general(*args)
        one_dtype, other_dtype = one.dtype, other.dtype
        if one_dtype is target and other_dtype is target:
            return original(one, other)
        if (
            (one_dtype is not full and one_dtype is not target)
            or (other_dtype is not full and other_dtype is not target)
            or not (one.is_cpu if on_cpu else one.is_cuda)
            or one.layout is not strided
            or other.layout is not strided
            or compiling()
            or any_autocast()
            or in_function_mode()
            or trace() is not None
        ):
            return general(*args)
        if not usual:
            return call(one, other)
        # `call` written out: it is a tenth of what a small product costs.
        cached = caches()
        try:
            switch_cache(False)
            switch(device_type, True)
            result = original(one, other)
        finally:
            switch(device_type, False)
            switch_cache(cached)
        return result if result.dtype is target else general(*args)

    return replacement


def _build_any(original: Any, general: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """Any of `HALF_OPS`, with whatever tensors and parameters by position."""
    local, deviations, pins, skipped = casts.local, casts.deviations, casts.cache.pins, _SKIPPED
    target, full, strided, on_cpu = casts.dtype, torch.float32, torch.strided, casts.device_type == "cpu"
    records = torch.is_grad_enabled
    compiling, any_autocast, in_function_mode, trace = SPECIAL_CASES
    call = _under_autocast(original, general, casts)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if deviations and not local.on:
            return passed(*args, **kwargs)
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                if arg.dtype is not target:
                    break
            elif kind not in skipped:
                break
        else:
            if not kwargs:
                return original(*args)
        if kwargs or compiling() or any_autocast() or in_function_mode() or trace() is not None:
            return general(*args, **kwargs)
        entries, narrowed, any_full = local.entries, [], False
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                dtype = arg.dtype
                if dtype is not target:
                    if dtype is not full or not (arg.is_cpu if on_cpu else arg.is_cuda) or arg.layout is not strided:
                        return general(*args)
                    pin = pins.get(id(arg)) if pins and kind is Parameter else None
                    if pin is not None:
                        cast = pin.valid()
                        if cast is None or (arg.requires_grad and records()):
                            return general(*args)
                        arg = cast
                    else:
                        any_full = True
                        if kind is Parameter and entries is not None:
                            if id(arg) in entries:
                                return general(*args)
                            entries[id(arg)] = None
            elif kind not in skipped:
                return general(*args)
            narrowed.append(arg)
        return call(*narrowed) if any_full else original(*narrowed)

    passed = casts.passing(original, replacement)
    return replacement


def build_to_half(original: Any, general: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """Build the replacement of one of `HALF_OPS` under the policy fp16.

    Args:
        original: One of `HALF_OPS`.
        general: The replacement that takes whatever is out of the ordinary.
        casts: The state that the replacement reads; its device type is ``"cpu"`` or ``"cuda"``.
    """
    under_autocast = _build_any(original, general, casts)
    if original.__name__.startswith(("linear", "conv")):
        return build_layer(original, under_autocast, casts)
    return _build_product(original, under_autocast, casts) if original.__name__ in _PRODUCTS else under_autocast


def build_composite(original: Any, general: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """Build the replacement of one of `COMPOSITES` under the policies fp32 and promote.

    Args:
        original: One of `COMPOSITES`.
        general: The replacement that takes whatever is out of the ordinary.
        casts: The state that the replacement reads.
    """
    local, deviations, here = casts.local, casts.deviations, on_device(casts.device_type)
    compiling, any_autocast, in_function_mode, trace = SPECIAL_CASES
    device_type, target, strided = casts.device_type, casts.dtype, torch.strided
    switch, switch_cache, caches = _SWITCHES
    dtype_of, give_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if deviations and not local.on:
            return passed(*args, **kwargs)
        any_half = False
        for arg in (*args, *kwargs.values()):
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                if arg.dtype in HALF_DTYPES:
                    if arg.layout is not strided or not here(arg):
                        return general(*args, **kwargs)
                    any_half = True
            elif kind not in _SKIPPED:
                return general(*args, **kwargs)
        if not any_half:
            return original(*args, **kwargs)
        if "out" in kwargs or compiling() or any_autocast() or in_function_mode() or trace() is not None:
            return general(*args, **kwargs)
        cached, before = caches(), dtype_of(device_type)
        try:
            # What promotes within refuses a half dtype that is not autocast's own.
            give_dtype(device_type, target)
            switch_cache(False)
            switch(device_type, True)
            return original(*args, **kwargs)
        finally:
            switch(device_type, False)
            switch_cache(cached)
            give_dtype(device_type, before)

    passed = casts.passing(original, replacement)
    return replacement


def _under_autocast(original: Any, general: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """The op, called with autocast on and as it was before afterwards; with ``general`` where that did not cast."""
    device_type, target = casts.device_type, casts.dtype
    switch, switch_cache, caches = _SWITCHES
    dtype_of, give_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
    usual = dtype_of(device_type) is target

    def call(*args: Any) -> Any:
        cached = caches()
        before = None if usual else dtype_of(device_type)
        try:
            if before is not None:
                give_dtype(device_type, target)
            switch_cache(False)
            switch(device_type, True)
            result = original(*args)
        finally:
            switch(device_type, False)
            switch_cache(cached)
            if before is not None:
                give_dtype(device_type, before)
        # Somebody gave this thread's autocast another dtype. An operator may leave it to its other operand.
        return result if result is NotImplemented or result.dtype is target else general(*args)

    return call
