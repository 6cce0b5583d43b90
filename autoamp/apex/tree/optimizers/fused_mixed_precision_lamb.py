"""The tree's `apex.optimizers.fused_mixed_precision_lamb`."""

from autoamp.apex.optimizers import FusedMixedPrecisionLamb
