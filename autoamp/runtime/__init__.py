"""The process's one active handle: how it is made, installed, switched, and what the public API does with it."""

from __future__ import annotations

from autoamp.runtime.api import (
    Region,
    current_handle,
    disable_casts,
    float_function,
    half_function,
    init,
    needed_handle,
    promote_function,
    put_handle,
    region,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from autoamp.runtime.events import activated, suspended
from autoamp.runtime.handle import Handle, Settings, Setup, device_type_of
from autoamp.runtime.no_op import NoOpHandle

__all__ = [
    "Handle",
    "NoOpHandle",
    "Region",
    "Settings",
    "Setup",
    "activated",
    "current_handle",
    "device_type_of",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "needed_handle",
    "promote_function",
    "put_handle",
    "region",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "suspended",
]
