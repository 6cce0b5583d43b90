"""The ops that layers call, `linear` and the convolutions: their input, weight and bias are cast to half.

These are most of a model's calls, so the replacement is written for speed. Weights are parameters, of which little need
be asked; their casts are shared within a module call, and under `handle.inference()` made once.
"""

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

SPECIAL_CASES = (
    torch.compiler.is_dynamo_compiling,
    is_any_autocast_enabled,
    in_function_mode,
    tracing_state,
)
"""What tells that only the general replacement will do: somebody compiles, an autocast region is in force, a mode sees
functions, or somebody traces (here the answer is None where nobody does)."""


def build_layer(original: Any, general: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """Build the replacement of `linear` or a convolution under the policy fp16.

    Args:
        original: The op: it takes an input, a weight, maybe a bias, and what else there is by position.
        general: The replacement that takes whatever is out of the ordinary.
        casts: The state that the replacement reads; its device type is ``"cpu"`` or ``"cuda"``.
    """
    local, deviations, cache = casts.local, casts.deviations, casts.cache
    pins, share = cache.pins, cache.share
    target, full, strided, on_cpu = casts.dtype, torch.float32, torch.strided, casts.device_type == "cpu"
    narrow, records = casts.narrow, torch.is_grad_enabled
    compiling, any_autocast, in_function_mode, trace = SPECIAL_CASES

    def layer(x: Tensor, weight: Parameter, bias: Parameter | None, *rest: Any) -> Any:
        # Called where nobody compiles or traces, with arguments of exactly these types.
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
            return general(x, weight, bias, *rest)
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
                        return general(x, weight, bias, *rest)
                return original(x, pinned.narrow_weight, pinned.narrow_bias, *rest)
        if (
            weight.dtype is not full
            or not (weight.is_cpu if on_cpu else weight.is_cuda)
            or weight.layout is not strided
            or (bias is not None and bias.dtype is not full)
        ):
            return general(x, weight, bias, *rest)
        if pin is not None:
            if not records() and pin_layer(cache, original, narrow, x, weight, bias, rest):
                return layer(x, weight, bias, *rest)
            return general(x, weight, bias, *rest)
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
            return general(*args, **kwargs)
        x, weight = args[0], args[1]
        bias = args[2] if len(args) > 2 else None
        kind, bias_kind = type(weight), type(bias)
        if type(x) is not Tensor or not (kind is Parameter or kind is Tensor):
            return general(*args)
        if x.dtype is target and weight.dtype is target:
            narrow_already = bias is None or ((bias_kind is Parameter or bias_kind is Tensor) and bias.dtype is target)
            return original(*args) if narrow_already else general(*args)
        if kind is Parameter and (bias is None or bias_kind is Parameter) and not compiling() and trace() is None:
            return layer(x, weight, bias, *args[3:])
        return general(*args)

    passed = casts.passing(original, layer)
    offer_shortcut(replacement, layer)
    return replacement
