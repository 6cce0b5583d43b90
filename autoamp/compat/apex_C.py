"""The tree's `apex_C`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.torch_private import flatten, unflatten

__all__ = ["flatten", "unflatten"]

__getattr__ = missing_names(__name__)
