"""Optimizers with the signatures of `apex.optimizers`, on torch's multi-tensor functions."""

from __future__ import annotations

from autoamp.optimizers.adam import FusedAdam
from autoamp.optimizers.lamb import FusedLAMB
from autoamp.optimizers.sgd import FusedSGD

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]
