"""The tree's `apex.optimizers.fused_mixed_precision_lamb`."""

from autoamp.optimizers import FusedMixedPrecisionLamb
