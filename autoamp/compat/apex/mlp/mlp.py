"""The tree's `apex.mlp.mlp`."""

from __future__ import annotations

from autoamp.compat.layers.mlp import MLP, mlp_function
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
