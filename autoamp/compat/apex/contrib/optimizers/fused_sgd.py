"""The tree's `apex.contrib.optimizers.fused_sgd`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.optimizers import FusedSGD

__getattr__ = missing_names(__name__)
