"""The functions of torch that are replaced for casts though no list names them.

With ``init(scope="modules")`` half tensors of autoamp meet numpy, fp32 tensors and numbers beyond fp16: a program for
plain fp32 writes ``buffer[mask] = x``, ``x.masked_fill_(mask, -1e9)`` and ``x.numpy()``, which torch refuses for some
half tensors. Here these go as they would in fp32. Calls that torch takes are torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoamp import torch_private
from autoamp.core.attention import build_half_attention
from autoamp.core.casts import CastState
from autoamp.core.composites import build_script_call
from autoamp.core.recurrent import build_check_input
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


def unlisted_functions(casts: CastState) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield the owner and the name of each, and what builds the replacement that `PatchSites.patch` names and marks."""
    yield torch.backends.mha, "get_fastpath_enabled", partial(_build_fast_path_check, casts=casts)
    yield torch.nn.RNNBase, "check_input", partial(build_check_input, casts=casts)
    for kind in torch_private.SCRIPTED:
        yield kind, "__call__", partial(build_script_call, casts=casts)
    if casts.in_modules:
        for build, places in ((_redone, _REDONE), (_writing, _WRITING)):
            for owner, name in places:
                yield owner, name, partial(build, casts=casts)
    if not casts.on_by_default:
        yield torch.nn.functional, "scaled_dot_product_attention", partial(build_half_attention, casts=casts)


def _build_fast_path_check(original: Callable[[], bool], casts: CastState) -> Any:
    """Build what the attention modules of torch ask for whether they may take their fast path for inference.

    That path computes all in the dtype of its input, norms included, so that a model would compute other bits without
    gradients. It is shut, as torch shuts it in its autocast regions. It stays open where the program turned casts off,
    and in `Handle.inference`, which promises speed.
    """

    def get_fastpath_enabled() -> bool:
        is_off = casts.local.mode.on is False and casts.on_by_default
        return original() if is_off or casts.cache.pins else False

    return get_fastpath_enabled


def _redone(original: Any, casts: CastState) -> Any:
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


def _writing(original: Any, casts: CastState) -> Any:
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
