"""The tree's `apex.contrib.optimizers.fused_adam`."""

from autoamp.apex.early.optimizers import ContribFusedAdam as FusedAdam
