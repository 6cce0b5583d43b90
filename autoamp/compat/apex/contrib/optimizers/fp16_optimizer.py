"""The tree's `apex.contrib.optimizers.fp16_optimizer`."""

from __future__ import annotations

from autoamp.compat.early.optimizers import FP16_Optimizer
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
