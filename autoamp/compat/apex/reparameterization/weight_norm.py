"""The tree's `apex.reparameterization.weight_norm`."""

from autoamp.compat.layers.weight_norm import WeightNorm
