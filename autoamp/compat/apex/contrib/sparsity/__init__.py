"""The tree's `apex.contrib.sparsity`."""

from autoamp.compat.layers.sparsity import ASP, create_mask

from . import asp, sparse_masklib
