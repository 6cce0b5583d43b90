"""The tree's `apex.optimizers.fused_mixed_precision_lamb`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.optimizers import FusedMixedPrecisionLamb

__getattr__ = missing_names(__name__)
