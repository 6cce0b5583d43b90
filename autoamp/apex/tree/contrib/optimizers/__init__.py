"""The tree's `apex.contrib.optimizers`."""

from autoamp.apex.early.optimizers import ContribFusedAdam as FusedAdam
from autoamp.apex.early.optimizers import FP16_Optimizer
from autoamp.apex.optimizers import FusedLAMB, FusedSGD
