"""The arithmetic of a step: loss scales, gradients that are unscaled and checked, ranks that agree."""

from __future__ import annotations

from autoamp.scaling.gradients import found_any, non_finite, scale_, total_norm, true_gradient, unscale_, widened
from autoamp.scaling.loss_scale import DynamicLossScaler, LossScaler, StaticLossScaler, is_count, make_scaler
from autoamp.scaling.shards import is_flat, is_sharded, local_of, meshes_of, reduce_partial
from autoamp.scaling.sync import (
    FoundInfReduction,
    RequestedGroup,
    SyncGroup,
    clip_,
    powered_norm,
    reduce_found_inf,
    sync_group,
)
from autoamp.scaling.unread_flags import Scale, UnreadFlags, is_same_scale, scale_ratio, scaled_loss

__all__ = [
    "DynamicLossScaler",
    "FoundInfReduction",
    "LossScaler",
    "RequestedGroup",
    "Scale",
    "StaticLossScaler",
    "SyncGroup",
    "UnreadFlags",
    "clip_",
    "found_any",
    "is_count",
    "is_flat",
    "is_same_scale",
    "is_sharded",
    "local_of",
    "make_scaler",
    "meshes_of",
    "non_finite",
    "powered_norm",
    "reduce_found_inf",
    "reduce_partial",
    "scale_",
    "scale_ratio",
    "scaled_loss",
    "sync_group",
    "total_norm",
    "true_gradient",
    "unscale_",
    "widened",
]

# Pickles name the package: they load wherever in it the files lie.
for _class in (LossScaler, StaticLossScaler, DynamicLossScaler):
    _class.__module__ = __name__
