"""The arithmetic of a step: loss scales, and gradients that are unscaled and checked."""

from __future__ import annotations

from autoamp.scaling.gradients import (
    found_any,
    grouped_by_kind,
    is_flat,
    is_sharded,
    local_of,
    non_finite,
    scale_,
    total_norm,
    true_gradient,
    unscale_,
    widened,
)
from autoamp.scaling.loss_scale import DynamicLossScaler, LossScaler, StaticLossScaler, is_count, make_scaler
from autoamp.scaling.unread_flags import Scale, UnreadFlags, is_same_scale, scale_ratio, scaled_loss

__all__ = [
    "DynamicLossScaler",
    "LossScaler",
    "Scale",
    "StaticLossScaler",
    "UnreadFlags",
    "found_any",
    "grouped_by_kind",
    "is_count",
    "is_flat",
    "is_same_scale",
    "is_sharded",
    "local_of",
    "make_scaler",
    "non_finite",
    "scale_",
    "scale_ratio",
    "scaled_loss",
    "total_norm",
    "true_gradient",
    "unscale_",
    "widened",
]

# Pickles name the package: they load wherever in it the files lie.
for _class in (LossScaler, StaticLossScaler, DynamicLossScaler):
    _class.__module__ = __name__
