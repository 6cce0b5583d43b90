"""The tree's `apex.pyprof`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names

from . import nvtx

__getattr__ = missing_names(__name__)
