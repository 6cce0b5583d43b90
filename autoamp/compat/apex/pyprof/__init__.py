"""The tree's `apex.pyprof`."""

from . import nvtx
