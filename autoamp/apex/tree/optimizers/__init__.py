"""The tree's `apex.optimizers`."""

# Copies of Apex for NPUs have torch's optimizers, with the same arguments, by these names.
from torch.optim import SGD as NpuFusedSGD
from torch.optim import Adadelta as NpuFusedAdadelta
from torch.optim import Adam as NpuFusedAdam
from torch.optim import AdamW as NpuFusedAdamW
from torch.optim import RMSprop as NpuFusedRMSprop

from autoamp.apex.early.optimizers import FP16_Optimizer, FusedAdam
from autoamp.apex.optimizers import FusedAdagrad, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
