"""`apex.contrib.optimizers`."""

from autoamp.apex.contrib.optimizers.fused_adam import ContribFusedAdam as FusedAdam
from autoamp.apex.fp16_utils import FP16_Optimizer
from autoamp.apex.optimizers import FusedLAMB, FusedSGD
