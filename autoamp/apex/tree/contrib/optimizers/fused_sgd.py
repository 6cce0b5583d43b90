"""The tree's `apex.contrib.optimizers.fused_sgd`."""

from autoamp.apex.optimizers import FusedSGD
