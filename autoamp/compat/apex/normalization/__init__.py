"""The tree's `apex.normalization`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm

from . import fused_layer_norm

__getattr__ = missing_names(__name__)
