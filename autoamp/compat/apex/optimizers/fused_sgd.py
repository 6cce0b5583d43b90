"""The tree's `apex.optimizers.fused_sgd`."""

from autoamp.optimizers import FusedSGD
