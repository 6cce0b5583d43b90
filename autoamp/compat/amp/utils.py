"""The functions of `apex.amp.utils`, `.compat` and `.rnn_compat` that public programs import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["filter_attrs", "has_old_rnns", "is_fp_tensor"]


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
