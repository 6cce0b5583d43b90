"""Where half tensors of autoamp meet numpy, fp32 tensors and numbers beyond fp16, with ``init(scope="modules")``.

A program for plain fp32 writes ``buffer[mask] = x``, ``x.masked_fill_(mask, -1e9)`` and ``x.numpy()``, which torch
refuses for some half tensors. Here these go as they would in fp32. Calls that torch takes are torch's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor

from autoamp.casting import CastState
from autoamp.patching import imitate
from autoamp.tensors import iter_tensors, map_tensors

_CLAMPS = ("clamp", "clamp_max", "clamp_min", "clip")
_FILLS = ("index_fill", "masked_fill")
# What gives a new tensor or array, and refuses numbers that half does not hold, several dtypes, or bf16 itself.
_REDONE = (
    *((owner, name) for owner in (torch, Tensor) for name in (*_CLAMPS, *_FILLS)),
    (torch, "constant_pad_nd"),
    (torch, "full_like"),
    (torch.nn.functional, "embedding_bag"),
    (torch.nn.functional, "pad"),
    (Tensor, "new_full"),
    (Tensor, "numpy"),
)
# What writes a value to a tensor.
_WRITING = tuple((Tensor, name) for name in (*(f"{name}_" for name in (*_CLAMPS, *_FILLS)), "fill_", "__setitem__"))


def interop_functions(casts: CastState) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return the owner and the name of each function, and what builds its replacement."""
    builds = [(_redone, one) for one in _REDONE] + [(_writing, one) for one in _WRITING]
    return [(owner, name, functools.partial(_named, build, casts, owner, name)) for build, (owner, name) in builds]


def _named(build: Callable[[Any, CastState], Any], casts: CastState, owner: Any, name: str, original: Any) -> Any:
    """Build a replacement and give it the original's names."""
    module, qualname = ("torch", f"Tensor.{name}") if owner is Tensor else (owner.__name__, name)
    return imitate(build(original, casts), original, module, qualname)


def _redone(original: Any, casts: CastState) -> Callable[..., Any]:
    """Build the replacement of a function that gives something new: what torch refuses in half is done in fp32."""
    half = casts.dtype

    def redone(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        except (RuntimeError, TypeError):
            if kwargs.get("out") is not None or all(one.dtype is not half for one in iter_tensors((args, kwargs))):
                raise
            new, new_kwargs = map_tensors((args, kwargs), lambda one: one.float() if one.dtype is half else one)
            return original(*new, **new_kwargs)

    return redone


def _writing(original: Any, casts: CastState) -> Callable[..., Any]:
    """Build the replacement of a method that writes to a tensor: the value takes the tensor's dtype, and fits it."""
    half, most = casts.dtype, torch.finfo(casts.dtype).max
    # An index is no value.
    first = 1 if original.__name__ == "__setitem__" else 0

    def fit(tensor: Tensor, value: Any) -> Any:
        if isinstance(value, Tensor):
            if {value.dtype, tensor.dtype} != {half, torch.float32}:
                return value
            if value.dim() or value.requires_grad or tensor.dtype is not half:
                return value.to(tensor.dtype)
            value = value.item()
        if tensor.dtype is not half or type(value) not in (int, float) or not math.isfinite(value):
            return value
        return max(-most, min(most, value))

    def writing(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type != casts.device_type or tensor.dtype not in (half, torch.float32):
            return original(tensor, *args, **kwargs)
        values = [fit(tensor, value) for value in args[first:]]
        return original(tensor, *args[:first], *values, **{name: fit(tensor, one) for name, one in kwargs.items()})

    return writing
