"""The arithmetic of a step: loss scales, gradients that are unscaled and checked, what was found in them."""

from __future__ import annotations

from autoamp.scaling.device_scale import Number, Scale, inverse, multiplied, number_of, quotient
from autoamp.scaling.formulas import (
    adagrad_,
    adam_on_device_,
    adam_updates,
    average_,
    blended_norms,
    corrections,
    gradient_norms,
    novograd_,
    trust_,
)
from autoamp.scaling.gradient_layout import GradientLayout
from autoamp.scaling.gradients import (
    GradientMark,
    Kind,
    ScaledMark,
    non_finite,
    scale_,
    total_norm,
    true_gradient,
    unscale_,
    widened,
)
from autoamp.scaling.late_flags import LateFlags
from autoamp.scaling.loss_scale import DynamicLossScaler, LossScaler, StaticLossScaler, is_count, make_scaler
from autoamp.scaling.ranks import is_flat, is_sharded, non_finite_now
from autoamp.scaling.verdict import Verdict, read, settle, settle_later, unseen

__all__ = [
    "DynamicLossScaler",
    "GradientLayout",
    "GradientMark",
    "Kind",
    "LateFlags",
    "LossScaler",
    "Number",
    "Scale",
    "ScaledMark",
    "StaticLossScaler",
    "Verdict",
    "adagrad_",
    "adam_on_device_",
    "adam_updates",
    "average_",
    "blended_norms",
    "corrections",
    "gradient_norms",
    "inverse",
    "is_count",
    "is_flat",
    "is_sharded",
    "make_scaler",
    "multiplied",
    "non_finite",
    "non_finite_now",
    "novograd_",
    "number_of",
    "quotient",
    "read",
    "scale_",
    "settle",
    "settle_later",
    "total_norm",
    "true_gradient",
    "trust_",
    "unscale_",
    "unseen",
    "widened",
]
