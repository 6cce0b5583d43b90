"""The tree's `apex.pyprof.nvtx`."""

from autoamp.compat.pyprof import init, wrap
