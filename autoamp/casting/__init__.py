"""Casts of arguments: what an op's tensors become, which casts are kept, and where casts are on."""

from __future__ import annotations

from autoamp.casting.cache import CastCache, Switches, cast_for_any_mode, serves_others
from autoamp.casting.casts import Casts, SparseArgument, cast_call, on_device

__all__ = [
    "CastCache",
    "Casts",
    "SparseArgument",
    "Switches",
    "cast_call",
    "cast_for_any_mode",
    "on_device",
    "serves_others",
]
