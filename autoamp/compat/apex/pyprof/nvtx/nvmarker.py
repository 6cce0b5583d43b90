"""The tree's `apex.pyprof.nvtx.nvmarker`."""

from autoamp.compat.pyprof import init
from autoamp.compat.pyprof import wrap as add_wrapper
