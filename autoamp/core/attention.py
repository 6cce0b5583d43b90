"""Attention: on a CPU in fp32 where torch's half kernel is slower, with a half result all the same.

The lists' functions do so where they cast, and a function of its own does for half models, whose functions do not cast.
The choice depends on the dtype and the number of tokens, never on whether gradients are recorded: a model computes the
same bits while it trains and under `torch.no_grad`.

Measured on an x86 CPU without AMX, one thread, heads of 32 and 64, casts included: with its backward pass attention in
fp32 takes of bf16's time 0.32 at 32 tokens, 0.46 at 64, 0.63 at 128, 0.96 at 192 and 1.0 at 256; of fp16's 0.2 or less
at any length, without the backward pass 0.5. Of a transformer's training step (width 512, 8 x 64 tokens) that is 10 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoamp.core.casts import CastState, cast_call

_LONGEST_IN_BF16 = 128
_NAMES = ("query", "key", "value")


def build_attention(original: Any, casts: CastState) -> Callable[..., Any] | None:
    """Build the way of `torch.nn.functional.scaled_dot_product_attention` on a CPU; None where half is as fast.

    Args:
        original: That function.
        casts: The casts of the handle.
    """
    in_fp16 = casts.dtype is torch.float16
    has = torch.cpu.get_capabilities()
    units = ("avx512_fp16", "amx_fp16") if in_fp16 else ("amx_bf16",)
    on_x86 = casts.device_type == "cpu" and str(has["architecture"]).startswith("x86")
    if not on_x86 or any(has.get(unit) for unit in units):
        return None

    def run_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        query, key, value = args[:3] if len(args) > 2 else (*args, *map(kwargs.get, _NAMES[len(args) :]))
        if query is None or key is None or value is None or not casts.eligible(query):
            return NotImplemented
        # Where casts are off only a half model's attention comes in half.
        if query.dtype is torch.float32 and casts.local.now().on is not True:
            return NotImplemented
        if not in_fp16 and max(query.size(-2), key.size(-2)) > _LONGEST_IN_BF16:
            return NotImplemented
        new, kwargs = cast_call(casts.args_to_fp32, args, kwargs)
        return original(*new, **kwargs).to(casts.dtype)

    return run_attention


def build_half_attention(original: Any, casts: CastState) -> Any:
    """Build the replacement of that function where no function casts, for half models."""
    in_fp32 = build_attention(original, casts)

    def attention(*args: Any, **kwargs: Any) -> Any:
        result = NotImplemented if in_fp32 is None else in_fp32(args, kwargs)
        return original(*args, **kwargs) if result is NotImplemented else result

    return attention
