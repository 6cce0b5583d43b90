"""The tree's `apex.pyprof`."""
