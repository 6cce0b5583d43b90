"""What programs import from `apex.amp.utils`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp.tensors import map_tensors


def is_fp_tensor(value: Any) -> bool:
    """Whether a value is a floating tensor, or a tuple or list of nothing else."""
    if isinstance(value, (tuple, list)):
        return all(map(is_fp_tensor, value))
    return isinstance(value, Tensor) and value.is_floating_point()


def maybe_half(value: Any, name: str = "", verbose: bool = False) -> Any:
    """Return a value with the floating CUDA tensors in it cast to fp16; the last two arguments have no effect."""
    return _cast_on_gpus(value, torch.float16)


def maybe_float(value: Any, name: str = "", verbose: bool = False) -> Any:
    """Return a value with the floating CUDA tensors in it cast to fp32; the last two arguments have no effect."""
    return _cast_on_gpus(value, torch.float32)


def _cast_on_gpus(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(value, lambda one: one.to(dtype) if one.is_cuda and one.is_floating_point() else one)
