"""`apex_C`, as autoamp serves it: Apex's extension that joins tensors into one and splits it again."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.torch_private import flatten, unflatten

__all__ = ["flatten", "unflatten"]

__getattr__ = missing_names(__name__)
