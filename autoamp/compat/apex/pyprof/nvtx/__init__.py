"""The tree's `apex.pyprof.nvtx`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.pyprof import init, wrap

from . import nvmarker

__getattr__ = missing_names(__name__)
