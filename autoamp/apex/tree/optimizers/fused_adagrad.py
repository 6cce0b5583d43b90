"""The tree's `apex.optimizers.fused_adagrad`."""

from autoamp.apex.optimizers import FusedAdagrad
