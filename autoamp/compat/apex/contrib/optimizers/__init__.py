"""The tree's `apex.contrib.optimizers`."""

from autoamp.compat.early.optimizers import ContribFusedAdam as FusedAdam
from autoamp.compat.early.optimizers import FP16_Optimizer
from autoamp.optimizers import FusedLAMB, FusedSGD
