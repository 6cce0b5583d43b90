"""The tree's `apex.contrib.optimizers.fused_adam`."""

from __future__ import annotations

from autoamp.compat.early.optimizers import ContribFusedAdam as FusedAdam
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
