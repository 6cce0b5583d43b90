"""The tree's `apex.pyprof.nvtx.nvmarker`."""

from autoamp.apex.pyprof import init
from autoamp.apex.pyprof import wrap as add_wrapper
