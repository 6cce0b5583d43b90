"""The tree's `apex.contrib.optimizers.fp16_optimizer`."""

from autoamp.apex.early.optimizers import FP16_Optimizer
