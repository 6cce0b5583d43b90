"""The tree's `apex.optimizers.fused_adagrad`."""

from autoamp.optimizers import FusedAdagrad
