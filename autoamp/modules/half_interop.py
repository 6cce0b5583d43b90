"""Where half tensors of autoamp meet numpy, fp32 tensors and numbers beyond fp16, with ``init(scope="modules")``.

A program for plain fp32 writes ``buffer[mask] = x``, ``x.masked_fill_(mask, -1e9)`` and ``x.numpy()``, which torch
refuses for some half tensors. Here these go as they would in fp32. Calls that torch takes are torch's own.
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

# What gives a new tensor, and refuses numbers that half does not hold, or arguments of several dtypes: redone in fp32.
_REDONE = (
    *((owner, name) for owner in (torch, Tensor) for name in ("clamp", "clamp_max", "clamp_min", "clip")),
    *((owner, name) for owner in (torch, Tensor) for name in ("index_fill", "masked_fill")),
    (torch, "constant_pad_nd"),
    (torch, "full_like"),
    (torch.nn.functional, "embedding_bag"),
    (torch.nn.functional, "pad"),
    (Tensor, "new_full"),
)
# What writes a number to a half tensor: one that it does not hold is written as the largest that it does.
_WRITING = (*(f"{name}_" for name in ("clamp", "clamp_max", "clamp_min", "clip", "index_fill", "masked_fill")), "fill_")


def interop_builders(casts: Casts) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return what is to be patched: owner, name, and what builds a replacement of the original."""
    interop = _HalfInterop(casts)
    builds: list[tuple[Any, str, Callable[[Any], Callable[..., Any]]]] = [
        (Tensor, "numpy", interop.build_numpy),
        (Tensor, "__setitem__", interop.build_setitem),
        *((owner, name, interop.build_redone) for owner, name in _REDONE),
        *((Tensor, name, interop.build_writing) for name in _WRITING),
    ]
    return [(owner, name, _named(owner, name, build)) for owner, name, build in builds]


def _named(owner: Any, name: str, build: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Any]:
    """Return what builds a replacement and gives it the original's names."""
    module, qualname = ("torch", f"Tensor.{name}") if owner is Tensor else (owner.__name__, name)
    return lambda original: imitate(build(original), original, module, qualname)


class _HalfInterop:
    """Builds the replacements for one handle."""

    def __init__(self, casts: Casts) -> None:
        self._casts = casts
        self._half = casts.dtype
        self._most = torch.finfo(casts.dtype).max

    def build_numpy(self, original: Any) -> Callable[..., Any]:
        """Build the replacement of `Tensor.numpy`: numpy has no bf16, and models compute fp32 to a program."""
        local, is_half, bf16 = self._casts.local, self._is_half, self._half is torch.bfloat16

        def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            # A half tensor outside of modules' calls may be the program's own, for which numpy has a dtype: float16.
            return original(self.float() if is_half(self) and (bf16 or local.on) else self, *args, **kwargs)

        return numpy

    def build_setitem(self, original: Any) -> Callable[..., Any]:
        """Build the replacement of ``Tensor.__setitem__``, which takes a value of another dtype for slices alone."""
        is_half, fit, pair = self._is_half, self._fit, {self._half, torch.float32}

        def setitem(self: Tensor, index: Any, value: Any) -> None:
            if isinstance(value, Tensor):
                if value.dtype is not self.dtype and {value.dtype, self.dtype} == pair:
                    value = value.to(self.dtype)
            elif type(value) is not bool and isinstance(value, (int, float)) and is_half(self):
                value = fit(value)
            original(self, index, value)

        return setitem

    def build_redone(self, original: Any) -> Callable[..., Any]:
        """Build the replacement of a function that gives a new tensor: what torch refuses in half is done in fp32."""

        def redone(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            except RuntimeError:
                if kwargs.get("out") is not None or not any(map(self._is_half, iter_tensors((args, kwargs)))):
                    raise
                new, new_kwargs = map_tensors((args, kwargs), self._widen)
                return original(*new, **new_kwargs)

        return redone

    def build_writing(self, original: Any) -> Callable[..., Any]:
        """Build the replacement of an in-place form: what is written fits the half tensor that it is written to."""

        def writing(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or not self._is_half(tensor):
                return original(tensor, *args, **kwargs)
            return original(tensor, *map(self._fit, args), **{name: self._fit(value) for name, value in kwargs.items()})

        return writing

    def _is_half(self, tensor: Tensor) -> bool:
        return tensor.dtype is self._half and tensor.device.type == self._casts.device_type

    def _widen(self, tensor: Tensor) -> Tensor:
        return tensor.float() if self._is_half(tensor) else tensor

    def _fit(self, value: Any) -> Any:
        """Return a finite number within the range of the half dtype; all else as it is."""
        if isinstance(value, Tensor):
            if value.dim() or not value.is_floating_point() or value.dtype is self._half:
                return value
            value = value.item()
        if type(value) is bool or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            return value
        return max(-self._most, min(self._most, value))
