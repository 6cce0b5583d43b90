"""The tree's `apex.contrib.sparsity.asp`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.sparsity import ASP

__getattr__ = missing_names(__name__)
