"""Casts of arguments: what an op's tensors become, which casts are kept, and whether casts are on in a thread."""

from __future__ import annotations

from autoamp.casting.cache import CastCache, cast_for_any_mode, is_cacheable
from autoamp.casting.casters import CastArgs, cast_call, dtype_with_sparse
from autoamp.casting.casts import CastState
from autoamp.casting.flat_weights import RECURRENT_LAYERS, LayOut, flat_layout, flatten_weights, lay_out_for_cudnn
from autoamp.casting.threads import Switches, ThreadState, Token, TracedMode

__all__ = [
    "RECURRENT_LAYERS",
    "CastArgs",
    "CastCache",
    "CastState",
    "LayOut",
    "Switches",
    "ThreadState",
    "Token",
    "TracedMode",
    "cast_call",
    "cast_for_any_mode",
    "dtype_with_sparse",
    "flat_layout",
    "flatten_weights",
    "is_cacheable",
    "lay_out_for_cudnn",
]
