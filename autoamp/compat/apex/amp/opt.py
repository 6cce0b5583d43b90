"""The tree's `apex.amp.opt`."""

from __future__ import annotations

from autoamp.compat.amp.utils import OptimWrapper
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
