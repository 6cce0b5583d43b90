"""The tree's `apex.contrib.index_mul_2d`."""

from __future__ import annotations

# By way of the submodule, so that a later import of it does not take the function's name.
from autoamp.compat.apex.contrib.index_mul_2d.index_mul_2d import index_mul_2d
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
