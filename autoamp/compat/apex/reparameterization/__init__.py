"""The tree's `apex.reparameterization`."""

from __future__ import annotations

from autoamp.compat.layers.weight_norm import (
    Reparameterization,
    WeightNorm,
    apply_reparameterization,
    apply_weight_norm,
    remove_reparameterization,
    remove_weight_norm,
)
from autoamp.compat.missing import missing_names

from . import reparameterization, weight_norm

__getattr__ = missing_names(__name__)
