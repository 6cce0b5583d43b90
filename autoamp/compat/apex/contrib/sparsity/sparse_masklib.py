"""The tree's `apex.contrib.sparsity.sparse_masklib`."""

from autoamp.compat.layers.sparsity import create_mask, m4n2_1d
