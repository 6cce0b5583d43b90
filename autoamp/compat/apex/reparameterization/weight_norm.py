"""The tree's `apex.reparameterization.weight_norm`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.weight_norm import WeightNorm

__getattr__ = missing_names(__name__)
