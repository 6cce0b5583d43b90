"""The tree's `apex.optimizers.fused_sgd`."""

from autoamp.apex.optimizers import FusedSGD
