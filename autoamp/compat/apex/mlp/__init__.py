"""The tree's `apex.mlp`."""

from __future__ import annotations

from autoamp.compat.layers.mlp import MLP
from autoamp.compat.missing import missing_names

from . import mlp

__getattr__ = missing_names(__name__)
