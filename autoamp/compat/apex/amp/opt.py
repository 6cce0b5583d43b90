"""The tree's `apex.amp.opt`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.utils import OptimWrapper

__getattr__ = missing_names(__name__)
