"""Ops with a weight that a layer calls, such as `linear`: each argument has its place, and its cast is written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.casting import Casts
from autoamp.inference import pin_layer
from autoamp.patching import offer_shortcut
from autoamp.torch_private import in_function_mode, is_any_autocast_enabled, tracing_state

__all__ = ["SPECIAL_CASES", "build_layer"]
# Whether somebody traces, an autocast region holds, or a mode looks at functions.
SPECIAL_CASES = (
    torch.compiler.is_dynamo_compiling,
    is_any_autocast_enabled,
    in_function_mode,
    tracing_state,
)


def build_layer(original: Any, otherwise: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """The commonest call of all: an input, a weight and maybe a bias, both fp32 parameters, and numbers."""
    local, deviations, cache = casts.local, casts.deviations, casts.cache
    pins, share = cache.pins, cache.share
    target, full, strided, on_cpu = casts.dtype, torch.float32, torch.strided, casts.device_type == "cpu"
    narrow, records = casts.narrow, torch.is_grad_enabled
    compiling, any_autocast, in_function_mode, trace = SPECIAL_CASES

    def layer(x: Tensor, weight: Parameter, bias: Parameter | None, *rest: Any) -> Any:
        # Called where nobody compiles or traces, with arguments of just these types.
        if deviations and not local.on:
            return passed(x, weight, bias, *rest)
        dtype = x.dtype
        if (
            (
                dtype is not target
                and (dtype is not full or x.layout is not strided or not (x.is_cpu if on_cpu else x.is_cuda))
            )
            or any_autocast()
            or in_function_mode()
        ):
            return otherwise(x, weight, bias, *rest)
        pin = pins.get(id(weight)) if pins else None
        if pin is not None and not records():
            pinned = pin.layer
            if pinned is not None and pinned.op is original and pinned.bias is bias:
                # What the weight is need not be asked again: somebody promised that it stays.
                x = x if dtype is target else narrow(x)
                if pinned.packed is not None:
                    result = pinned.run(x, rest)
                    if result is not None:
                        return result
                    if pinned.narrow_weight is None:
                        return otherwise(x, weight, bias, *rest)
                return original(x, pinned.narrow_weight, pinned.narrow_bias, *rest)
        if (
            weight.dtype is not full
            or not (weight.is_cpu if on_cpu else weight.is_cuda)
            or weight.layout is not strided
            or (bias is not None and bias.dtype is not full)
        ):
            return otherwise(x, weight, bias, *rest)
        if pin is not None:
            if not records() and pin_layer(cache, original, narrow, x, weight, bias, rest):
                return layer(x, weight, bias, *rest)
            return otherwise(x, weight, bias, *rest)
        entries, narrow_bias = local.entries, None
        if entries is None:
            x = x if dtype is target else narrow(x)
        elif dtype is full:
            x = share(x, narrow)
        if entries is not None and id(weight) in entries:
            # It was used before in this module call: now its cast is worth keeping. That and the device are asked here,
            # since a function for either would take `linear` from two Python frames to four.
            if bias is not None:
                narrow_bias = cache.cast(bias, narrow)
            return original(x, cache.cast(weight, narrow), narrow_bias, *rest)
        if entries is not None:
            entries[id(weight)] = None
        if bias is not None:
            narrow_bias = narrow(bias)
        return original(x, narrow(weight), narrow_bias, *rest)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) < 2:
            return otherwise(*args, **kwargs)
        x, weight = args[0], args[1]
        bias = args[2] if len(args) > 2 else None
        kind, bias_kind = type(weight), type(bias)
        if type(x) is not Tensor or not (kind is Parameter or kind is Tensor):
            return otherwise(*args)
        if x.dtype is target and weight.dtype is target:
            narrow_already = bias is None or ((bias_kind is Parameter or bias_kind is Tensor) and bias.dtype is target)
            return original(*args) if narrow_already else otherwise(*args)
        if kind is Parameter and (bias is None or bias_kind is Parameter) and not compiling() and trace() is None:
            return layer(x, weight, bias, *args[3:])
        return otherwise(*args)

    passed = casts.passing(original, layer)
    offer_shortcut(replacement, layer)
    return replacement
