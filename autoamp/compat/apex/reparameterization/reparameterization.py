"""The tree's `apex.reparameterization.reparameterization`."""

from autoamp.compat.layers.weight_norm import Reparameterization
