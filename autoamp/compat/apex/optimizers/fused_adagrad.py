"""The tree's `apex.optimizers.fused_adagrad`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.optimizers import FusedAdagrad

__getattr__ = missing_names(__name__)
