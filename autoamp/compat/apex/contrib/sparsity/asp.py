"""The tree's `apex.contrib.sparsity.asp`."""

from __future__ import annotations

from autoamp.compat.layers.sparsity import ASP
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
