"""The tree's `apex.contrib.sparsity`."""

from __future__ import annotations

from autoamp.compat.layers.sparsity import ASP, create_mask
from autoamp.compat.missing import missing_names

from . import asp, sparse_masklib

__getattr__ = missing_names(__name__)
