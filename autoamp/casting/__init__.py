"""Casts of arguments: what an op's tensors become, which casts are kept, and whether casts are on in a thread."""

from __future__ import annotations

from autoamp.casting.cache import CastCache, cast_for_any_mode, is_cacheable
from autoamp.casting.casts import CastArgs, CastState, cast_call, dtype_with_sparse
from autoamp.casting.flat_weights import RECURRENT_LAYERS, flat_layout, flatten_weights
from autoamp.casting.threads import ThreadState, Token, TracedMode

__all__ = [
    "RECURRENT_LAYERS",
    "CastArgs",
    "CastCache",
    "CastState",
    "ThreadState",
    "Token",
    "TracedMode",
    "cast_call",
    "cast_for_any_mode",
    "dtype_with_sparse",
    "flat_layout",
    "flatten_weights",
    "is_cacheable",
]
