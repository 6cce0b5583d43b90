"""The tree's `apex.normalization`."""

from autoamp.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm

from . import fused_layer_norm
