"""`apex.reparameterization`: weight norm."""

from autoamp.apex.reparameterization.weight_norm import WeightNorm, apply_weight_norm, remove_weight_norm
