"""The tree's `apex.reparameterization.weight_norm`."""

from __future__ import annotations

from autoamp.compat.layers.weight_norm import WeightNorm
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
