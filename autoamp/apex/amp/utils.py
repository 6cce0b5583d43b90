"""What programs import from `apex.amp.utils`, `.compat`, `.opt` and `.rnn_compat`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.tensors import map_tensors


def is_fp_tensor(value: Any) -> bool:
    """Whether a value is a floating tensor, or a tuple or list of nothing else."""
    if isinstance(value, (tuple, list)):
        return all(map(is_fp_tensor, value))
    return isinstance(value, Tensor) and value.is_floating_point()


def has_old_rnns() -> bool:
    """Return False: this torch has no recurrent layers from before torch 1.0."""
    return False


def filter_attrs(module: Any, names: Sequence[str]) -> list[str]:
    """Return those of ``names`` that are attributes of a module."""
    return [name for name in names if hasattr(module, name)]


def maybe_half(value: Any, name: str = "", verbose: bool = False) -> Any:
    """Return a value with the floating CUDA tensors in it cast to fp16; the last two arguments have no effect."""
    return _cast_on_gpus(value, torch.float16)


def maybe_float(value: Any, name: str = "", verbose: bool = False) -> Any:
    """Return a value with the floating CUDA tensors in it cast to fp32; the last two arguments have no effect."""
    return _cast_on_gpus(value, torch.float32)


def _cast_on_gpus(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(value, lambda one: one.to(dtype) if one.is_cuda and one.is_floating_point() else one)


class OptimWrapper:
    """An optimizer with a ``scale_loss`` of its own, as ``handle.wrap_optimizer`` returned it in Apex.

    Args:
        optimizer: Any optimizer.
        amp_handle: The handle of ``amp.init``.
        num_loss: How many losses there are between two steps.
    """

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int = 1) -> None:
        self._optimizer = amp_handle.wrap_optimizer(optimizer, num_loss)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)
