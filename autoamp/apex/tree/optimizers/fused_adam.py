"""The tree's `apex.optimizers.fused_adam`."""

from autoamp.apex.early.optimizers import FusedAdam
