"""The tree's `apex.reparameterization.reparameterization`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.weight_norm import Reparameterization

__getattr__ = missing_names(__name__)
