"""The tree's `apex.contrib.index_mul_2d`."""

# By way of the submodule, so that a later import of it does not take the function's name.
from .index_mul_2d import index_mul_2d
