"""The tree's `apex.optimizers`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.fp16_optimizer import FP16_Optimizer
from autoamp.optimizers import FusedAdam, FusedLAMB, FusedSGD

from . import fused_adam, fused_lamb, fused_sgd

__getattr__ = missing_names(__name__)
