"""The tree's `apex.reparameterization.reparameterization`."""

from __future__ import annotations

from autoamp.compat.layers.weight_norm import Reparameterization
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
