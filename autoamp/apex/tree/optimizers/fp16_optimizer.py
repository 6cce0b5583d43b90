"""The tree's `apex.optimizers.fp16_optimizer`."""

from autoamp.apex.early.optimizers import FP16_Optimizer
