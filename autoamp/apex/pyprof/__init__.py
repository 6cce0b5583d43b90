"""`apex.pyprof`, which marked calls for NVIDIA's profilers."""
