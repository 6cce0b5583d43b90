"""Optimizers with the signatures of `apex.optimizers`, on torch's multi-tensor functions."""

from __future__ import annotations

from autoamp.optimizers.adagrad import FusedAdagrad as FusedAdagrad
from autoamp.optimizers.adam import FusedAdam as FusedAdam
from autoamp.optimizers.lamb import FusedLAMB as FusedLAMB
from autoamp.optimizers.mixed_precision_lamb import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
from autoamp.optimizers.novograd import FusedNovoGrad as FusedNovoGrad
from autoamp.optimizers.sgd import FusedSGD as FusedSGD
