"""The tree's `apex.normalization`."""

from autoamp.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
