"""The tree's `apex.optimizers.fp16_optimizer`."""

from autoamp.compat.early.optimizers import FP16_Optimizer
