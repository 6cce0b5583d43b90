"""The tree's `apex.contrib.optimizers.fused_lamb`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.optimizers import FusedLAMB

__getattr__ = missing_names(__name__)
