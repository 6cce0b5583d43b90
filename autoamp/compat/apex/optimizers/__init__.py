"""The tree's `apex.optimizers`."""

from autoamp.compat.early.optimizers import FP16_Optimizer, FusedAdam
from autoamp.optimizers import FusedAdagrad, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
