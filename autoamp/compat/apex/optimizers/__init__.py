"""The tree's `apex.optimizers`."""

from __future__ import annotations

from autoamp.compat.early.optimizers import FP16_Optimizer, FusedAdam
from autoamp.compat.missing import missing_names
from autoamp.optimizers import FusedAdagrad, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD

__getattr__ = missing_names(__name__)
