"""`FP16_Optimizer` as `apex.optimizers` had it in early 2019."""

from autoamp.apex.fp16_utils.fp16_optimizer import FP16_Optimizer
