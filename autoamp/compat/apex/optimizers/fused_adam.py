"""The tree's `apex.optimizers.fused_adam`."""

from autoamp.compat.early.optimizers import FusedAdam
