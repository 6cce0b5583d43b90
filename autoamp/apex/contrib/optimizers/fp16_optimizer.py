"""`FP16_Optimizer` as `apex.contrib.optimizers` has it."""

from autoamp.apex.fp16_utils import FP16_Optimizer
