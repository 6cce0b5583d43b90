"""Where half tensors of autoamp meet numpy and fp32 tensors, with ``init(scope="modules")``.

A program for plain fp32 writes ``buffer[mask] = x``, ``x.masked_fill(mask, -1e9)`` and ``x.numpy()``, which torch
refuses for some half tensors. Here these go as they would in fp32; calls that torch takes are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor

from autoamp.casting import Casts
from autoamp.patching import imitate
from autoamp.tensors import iter_tensors, map_tensors

__all__ = ["interop_builders"]

_REDONE = (
    (torch, "masked_fill"),
    (Tensor, "masked_fill"),
    (torch.nn.functional, "embedding_bag"),
)
"""Functions that refuse numbers that half does not hold, or arguments of several dtypes: redone in fp32 then."""


def interop_builders(casts: Casts) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return what is to be patched: owner, name, and what builds a replacement of the original."""
    half, local = casts.dtype, casts.local

    def is_half(tensor: Tensor) -> bool:
        return tensor.dtype is half and tensor.device.type == casts.device_type

    def build_numpy(original: Any) -> Any:
        def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            # numpy has no bf16. A float16 tensor outside of modules' calls may be the program's own.
            widens = is_half(self) and (half is torch.bfloat16 or local.on)
            return original(self.float() if widens else self, *args, **kwargs)

        return imitate(numpy, original, "torch", "Tensor.numpy")

    def build_setitem(original: Any) -> Any:
        def setitem(self: Tensor, index: Any, value: Any) -> None:
            # Torch takes a value of another dtype for slices alone.
            if isinstance(value, Tensor) and {value.dtype, self.dtype} == {half, torch.float32}:
                value = value.to(self.dtype)
            original(self, index, value)

        return imitate(setitem, original, "torch", "Tensor.__setitem__")

    def build_redone(original: Any) -> Any:
        def redone(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            except RuntimeError:
                if not any(map(is_half, iter_tensors((args, kwargs)))):
                    raise
                args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.float() if is_half(tensor) else tensor)
                return original(*args, **kwargs)

        in_tensor = isinstance(original, type(Tensor.add))
        return imitate(redone, original, "torch", f"Tensor.{original.__name__}" if in_tensor else original.__name__)

    return [
        (Tensor, "numpy", build_numpy),
        (Tensor, "__setitem__", build_setitem),
        *((owner, name, build_redone) for owner, name in _REDONE),
    ]
