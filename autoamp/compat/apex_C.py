"""The tree's `apex_C`."""

from __future__ import annotations

from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

from autoamp.compat.missing import missing_names

__all__ = ["flatten", "unflatten"]

__getattr__ = missing_names(__name__)
