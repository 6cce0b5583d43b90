"""The tree's `apex.reparameterization.weight_norm`."""

from autoamp.apex.layers.weight_norm import WeightNorm
