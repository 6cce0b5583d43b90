"""Optimizers with the signatures of `apex.optimizers`, on torch's multi-tensor functions."""

# Copies of Apex for NPUs have torch's optimizers, with the same arguments, by these names.
from torch.optim import SGD as NpuFusedSGD
from torch.optim import Adadelta as NpuFusedAdadelta
from torch.optim import Adam as NpuFusedAdam
from torch.optim import AdamW as NpuFusedAdamW
from torch.optim import RMSprop as NpuFusedRMSprop

from autoamp.apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from autoamp.apex.optimizers.fused_adagrad import FusedAdagrad as FusedAdagrad
from autoamp.apex.optimizers.fused_adam import FusedAdam as FusedAdam
from autoamp.apex.optimizers.fused_lamb import FusedLAMB as FusedLAMB
from autoamp.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
from autoamp.apex.optimizers.fused_novograd import FusedNovoGrad as FusedNovoGrad
from autoamp.apex.optimizers.fused_sgd import FusedSGD as FusedSGD
