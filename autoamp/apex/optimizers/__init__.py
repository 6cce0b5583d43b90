"""Optimizers with the signatures of `apex.optimizers`, on torch's multi-tensor functions."""

from __future__ import annotations

from autoamp.apex.optimizers.fused_adagrad import FusedAdagrad as FusedAdagrad
from autoamp.apex.optimizers.fused_adam import FusedAdam as FusedAdam
from autoamp.apex.optimizers.fused_lamb import FusedLAMB as FusedLAMB
from autoamp.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
from autoamp.apex.optimizers.fused_novograd import FusedNovoGrad as FusedNovoGrad
from autoamp.apex.optimizers.fused_sgd import FusedSGD as FusedSGD
