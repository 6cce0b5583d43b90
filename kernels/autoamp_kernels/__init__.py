"""Fused optimizer steps on CPUs and in CUDA, for `autoamp`.

Importing this never fails: `doors` says what can run here, and why the rest cannot.
"""

from __future__ import annotations

from typing import Any

from autoamp_kernels.doors import Door, doors
from autoamp_kernels.errors import ArgumentError, KernelError

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Door",
    "KernelError",
    "adagrad_",
    "adam_",
    "available",
    "axpby_",
    "channel_statistics",
    "doors",
    "lamb_",
    "layer_norm_backward",
    "merge_statistics",
    "novograd_",
    "rms_norm_backward",
    "scale_",
    "sgd_",
]

try:
    from autoamp_kernels.gradients import axpby_, scale_
    from autoamp_kernels.layerwise import lamb_, novograd_
    from autoamp_kernels.norms import channel_statistics, layer_norm_backward, merge_statistics, rms_norm_backward
    from autoamp_kernels.optimizers import adagrad_, adam_, sgd_
except Exception as error:  # torch is missing, or of another kind than any that was tested
    _failed = error

    def __getattr__(name: str) -> Any:
        if name in __all__:
            raise KernelError(f"autoamp_kernels.{name} needs torch, which failed: {_failed!r}")
        raise AttributeError(name)


def available(device_type: str) -> bool:
    """Tell whether kernels can run on devices of a type, such as ``"cpu"`` or ``"cuda"``."""
    return any(door.open for door in doors() if door.name == device_type)
