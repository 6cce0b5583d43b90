"""`apex.pyprof.nvtx`."""

from autoamp.apex.pyprof.nvtx.nvmarker import add_wrapper as wrap
from autoamp.apex.pyprof.nvtx.nvmarker import init
