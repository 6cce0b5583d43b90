"""The tree's `apex.optimizers.fused_adam`."""

from __future__ import annotations

from autoamp.compat.early.optimizers import FusedAdam
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
