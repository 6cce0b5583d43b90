"""The tree's `apex.contrib.optimizers.fused_adam`."""

from autoamp.compat.early.optimizers import ContribFusedAdam as FusedAdam
