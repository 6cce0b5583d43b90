"""The tree's `apex.contrib.optimizers`."""

from __future__ import annotations

from autoamp.compat.early.optimizers import ContribFusedAdam as FusedAdam
from autoamp.compat.early.optimizers import FP16_Optimizer
from autoamp.compat.missing import missing_names
from autoamp.optimizers import FusedLAMB, FusedSGD

from . import fp16_optimizer, fused_adam, fused_lamb, fused_sgd

__getattr__ = missing_names(__name__)
