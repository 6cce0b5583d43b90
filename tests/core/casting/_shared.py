"""Casts that are open, and values to cast: what several tests of casting need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from autoamp.core import CastState

HALVES = [torch.float16, torch.bfloat16]

CAST_DTYPES = [torch.float16, torch.bfloat16, torch.float32]

OTHER_DTYPES = [
    torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
    torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def make(dtype: torch.dtype = torch.float16, device: str = "cpu", **settings: Any) -> CastState:
    casts = CastState(dtype, device, **settings)
    casts.enable()
    return casts


def full_like(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.zeros(2, device=device).to(dtype)


tensors = st.sampled_from([*CAST_DTYPES, *OTHER_DTYPES]).map(full_like)

parameters = st.sampled_from(CAST_DTYPES).map(lambda dtype: Parameter(full_like(dtype)))

nested = st.recursive(
    st.one_of(tensors, parameters, st.integers(), st.none(), st.text(max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


def snapshot(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value), list(map(snapshot, value))
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    return id(value), getattr(value, "dtype", None), getattr(value, "_version", None)


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]
