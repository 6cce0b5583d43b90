"""The tree's `apex.reparameterization`."""

from autoamp.apex.layers.weight_norm import WeightNorm, apply_weight_norm, remove_weight_norm
