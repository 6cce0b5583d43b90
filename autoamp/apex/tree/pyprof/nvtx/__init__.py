"""The tree's `apex.pyprof.nvtx`."""

from autoamp.apex.pyprof import init, wrap
