"""The tree's `apex.mlp.mlp`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.mlp import MLP, mlp_function

__getattr__ = missing_names(__name__)
