"""The tree's `apex.contrib.sparsity.sparse_masklib`."""

from __future__ import annotations

from autoamp.compat.layers.sparsity import create_mask, m4n2_1d, m4n2_2d_best, m4n2_2d_greedy
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
