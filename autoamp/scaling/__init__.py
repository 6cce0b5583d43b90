"""The arithmetic of a step: loss scales, gradients that are unscaled and checked, the formulas of optimizers."""

from __future__ import annotations

from autoamp.scaling.agreement import Agreements, AskedGroup, Ballot, Together
from autoamp.scaling.device_scale import (
    ClippedFactor,
    DeviceFactor,
    Factor,
    Number,
    Scale,
    inverse_scale,
    kernel_factor,
    multiplied_loss,
    number_of,
    scale_ratio,
)
from autoamp.scaling.formulas import (
    adagrad_,
    adam_on_device_,
    adam_updates,
    average_,
    blended_norms,
    corrections,
    fused_adam_,
    fused_sgd_,
    gradient_norms,
    novograd_,
    trust_,
)
from autoamp.scaling.gradient_layout import GradientLayout
from autoamp.scaling.gradients import (
    DeviceAndDtype,
    GradientMark,
    ScaledMark,
    UsualGradients,
    check_,
    multiply_,
    non_finite,
    scale_,
    total_norm,
    true_gradient,
    unscale_,
    widened,
)
from autoamp.scaling.late_flags import LateFlags
from autoamp.scaling.loss_scale import DynamicLossScaler, LossScaler, StaticLossScaler, is_count, make_scaler
from autoamp.scaling.ranks import clip_, clip_coefficient, non_finite_now, powered_norm
from autoamp.scaling.shards import has_shards, is_flat, is_sharded, local_of, settle_partial
from autoamp.scaling.unchanged import Looked
from autoamp.scaling.verdict import (
    AgreedVerdict,
    Verdict,
    newly_found,
    read_verdicts,
    settle_on_device,
    settle_verdicts,
)

__all__ = [
    "AgreedVerdict",
    "Agreements",
    "AskedGroup",
    "Ballot",
    "ClippedFactor",
    "DeviceAndDtype",
    "DeviceFactor",
    "DynamicLossScaler",
    "Factor",
    "GradientLayout",
    "GradientMark",
    "LateFlags",
    "Looked",
    "LossScaler",
    "Number",
    "Scale",
    "ScaledMark",
    "StaticLossScaler",
    "Together",
    "UsualGradients",
    "Verdict",
    "adagrad_",
    "adam_on_device_",
    "adam_updates",
    "average_",
    "blended_norms",
    "check_",
    "clip_",
    "clip_coefficient",
    "corrections",
    "fused_adam_",
    "fused_sgd_",
    "gradient_norms",
    "has_shards",
    "inverse_scale",
    "is_count",
    "is_flat",
    "is_sharded",
    "kernel_factor",
    "local_of",
    "make_scaler",
    "multiplied_loss",
    "multiply_",
    "newly_found",
    "non_finite",
    "non_finite_now",
    "novograd_",
    "number_of",
    "powered_norm",
    "read_verdicts",
    "scale_",
    "scale_ratio",
    "settle_on_device",
    "settle_partial",
    "settle_verdicts",
    "total_norm",
    "true_gradient",
    "trust_",
    "unscale_",
    "widened",
]

# Pickles name the package: they load wherever in it the files lie.
for _class in (LossScaler, StaticLossScaler, DynamicLossScaler):
    _class.__module__ = __name__
