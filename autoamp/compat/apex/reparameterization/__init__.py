"""The tree's `apex.reparameterization`."""

from autoamp.compat.layers.weight_norm import (
    Reparameterization,
    WeightNorm,
    apply_reparameterization,
    apply_weight_norm,
    remove_reparameterization,
    remove_weight_norm,
)

from . import reparameterization, weight_norm
