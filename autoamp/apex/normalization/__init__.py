"""Layer and RMS norms with the signatures of `apex.normalization`."""

from autoamp.apex.normalization.fused_layer_norm import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)
