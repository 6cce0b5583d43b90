"""Optimizers with the signatures of `apex.optimizers`, on torch's multi-tensor functions."""

from __future__ import annotations

from autoamp.optimizers.adagrad import FusedAdagrad
from autoamp.optimizers.adam import FusedAdam
from autoamp.optimizers.lamb import FusedLAMB
from autoamp.optimizers.mixed_precision_lamb import FusedMixedPrecisionLamb
from autoamp.optimizers.novograd import FusedNovoGrad
from autoamp.optimizers.sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]
