"""The process's one active handle: how it is made, installed, switched, and what the public API does with it."""

from __future__ import annotations

from autoamp.runtime.active import activated, current_handle, current_runtime, needed_handle, put_handle
from autoamp.runtime.api import (
    Region,
    disable_casts,
    float_function,
    half_function,
    init,
    promote_function,
    region,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from autoamp.runtime.handle import BaseHandle, Handle, NoOpHandle, runtime_of
from autoamp.runtime.runtime import Runtime, suspended
from autoamp.runtime.settings import OnNonfinite, Settings, check_device, device_type_of

__all__ = [
    "BaseHandle",
    "Handle",
    "NoOpHandle",
    "OnNonfinite",
    "Region",
    "Runtime",
    "Settings",
    "activated",
    "check_device",
    "current_handle",
    "current_runtime",
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
    "runtime_of",
    "suspended",
]
