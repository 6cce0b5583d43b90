"""The tree's `apex.contrib.index_mul_2d.index_mul_2d`."""

from autoamp.compat.layers.contrib import index_mul_2d as index_mul_2d
