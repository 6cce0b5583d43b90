"""The tree's `apex.optimizers`."""

from autoamp.compat.early.optimizers import FP16_Optimizer, FusedAdam
from autoamp.optimizers import FusedAdagrad, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD

from . import (
    fp16_optimizer,
    fused_adagrad,
    fused_adam,
    fused_lamb,
    fused_mixed_precision_lamb,
    fused_novograd,
    fused_sgd,
)
