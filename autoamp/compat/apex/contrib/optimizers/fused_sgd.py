"""The tree's `apex.contrib.optimizers.fused_sgd`."""

from autoamp.optimizers import FusedSGD
