"""The tree's `apex.contrib.index_mul_2d.index_mul_2d`."""

from __future__ import annotations

from autoamp.compat.layers.contrib import index_mul_2d as index_mul_2d
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
