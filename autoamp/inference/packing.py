"""Where oneDNN's kernels for packed weights may be called: for which weights, inputs and convolutions.

Packed is what lies in a layout of oneDNN's own, which only its kernels read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp.torch_private import (
    dispatch_modes,
    in_dual_level,
    in_function_mode,
    is_any_autocast_enabled,
    is_transformed,
    mkldnn,
    mkldnn_enabled,
    tracing_state,
)

__all__ = ["can_pack", "image_strides", "is_alike_in_both_directions", "may_call_onednn"]


def can_pack(weight: Tensor) -> bool:
    """Tell whether oneDNN packs weights of this dtype, on this CPU."""
    return (
        weight.dtype is torch.bfloat16
        and weight.is_cpu
        and weight.numel() > 0
        and torch.backends.mkldnn.is_available()
        and mkldnn.has_bf16()
    )


def may_call_onednn(x: Tensor) -> bool:
    """Tell whether an op of oneDNN's own may be called for ``x``, in place of torch's.

    Not where a mode, a tracer, forward-mode derivatives or a transform of `torch.func` would have to see torch's op, in
    a region of torch.autocast, or where the user turned oneDNN off.
    """
    return (
        x.is_cpu
        and (x.dtype is torch.bfloat16 or (x.dtype is torch.float32 and x.layout is torch.strided))
        and not x.is_nested
        and mkldnn_enabled()
        and not is_any_autocast_enabled()
        and not in_function_mode()
        and not dispatch_modes()
        and not in_dual_level()
        and not is_transformed(x)
        and tracing_state() is None
    )


def image_strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides that a contiguous tensor of shape ``(batch, channels, height, width)`` has.

    Where an extent is 1 torch calls other strides contiguous too, and oneDNN may read them as another layout.
    """
    _, channels, height, width = shape
    return channels * height * width, height * width, width, 1


def is_alike_in_both_directions(rest: tuple[Any, ...]) -> bool:
    """Tell whether a convolution is the same in height and width, neither dilated nor in groups.

    Args:
        rest: Stride, padding, dilation and groups, as `torch.conv2d` takes them: all but the last are pairs.
    """
    if len(rest) != 4 or rest[2] != (1, 1) or type(rest[3]) is not int or rest[3] != 1:
        return False
    return all(
        type(pair) is tuple and len(pair) == 2 and type(pair[0]) is type(pair[1]) is int and least <= pair[0] == pair[1]
        for pair, least in zip(rest[:2], (1, 0), strict=True)
    )
