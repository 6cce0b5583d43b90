"""The tree's `apex.pyprof.nvtx.nvmarker`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.pyprof import init
from autoamp.compat.pyprof import wrap as add_wrapper

__getattr__ = missing_names(__name__)
