"""The tree's `apex.contrib.optimizers.fp16_optimizer`."""

from autoamp.compat.early.optimizers import FP16_Optimizer
