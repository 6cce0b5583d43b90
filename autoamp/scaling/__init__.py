"""The arithmetic of a step: loss scales, and gradients that are unscaled and checked."""

from __future__ import annotations

from autoamp.scaling.gradients import CheckedGrads as CheckedGrads
from autoamp.scaling.gradients import found_any as found_any
from autoamp.scaling.gradients import grouped_by_kind as grouped_by_kind
from autoamp.scaling.gradients import is_flat as is_flat
from autoamp.scaling.gradients import is_same_gradient as is_same_gradient
from autoamp.scaling.gradients import is_sharded as is_sharded
from autoamp.scaling.gradients import local_of as local_of
from autoamp.scaling.gradients import mark_of as mark_of
from autoamp.scaling.gradients import non_finite as non_finite
from autoamp.scaling.gradients import scale_ as scale_
from autoamp.scaling.gradients import total_norm as total_norm
from autoamp.scaling.gradients import true_gradient as true_gradient
from autoamp.scaling.gradients import unscale_ as unscale_
from autoamp.scaling.gradients import widened as widened
from autoamp.scaling.loss_scale import DynamicLossScaler as DynamicLossScaler
from autoamp.scaling.loss_scale import LossScaler as LossScaler
from autoamp.scaling.loss_scale import StaticLossScaler as StaticLossScaler
from autoamp.scaling.loss_scale import is_count as is_count
from autoamp.scaling.loss_scale import make_scaler as make_scaler
from autoamp.scaling.unread_flags import Scale as Scale
from autoamp.scaling.unread_flags import UnreadFlags as UnreadFlags
from autoamp.scaling.unread_flags import is_same_scale as is_same_scale
from autoamp.scaling.unread_flags import scale_ratio as scale_ratio
from autoamp.scaling.unread_flags import scaled_loss as scaled_loss

# Pickles name the package: they load wherever in it the files lie.
for _class in (LossScaler, StaticLossScaler, DynamicLossScaler):
    _class.__module__ = __name__
