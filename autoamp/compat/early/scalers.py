"""The scalers of `apex.fp16_utils` and of its `FP16_Optimizer`, with the attributes that programs read and write."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from autoamp import fp16_utils, scaling


class CurScale:
    """A scaler, or what has one as ``_scaler``, whose scale is read and written as ``cur_scale`` too."""

    @property
    def cur_scale(self) -> float:
        """The scale for the next loss.

        It may be written. As in Apex it may be beyond a dynamic scaler's limits, which give way. LossScaleError: no
        scaler takes this scale.
        """
        return float(_scaler_of(self).loss_scale)

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        scaler, scale = _scaler_of(self), scaling.StaticLossScaler(float(scale)).loss_scale
        if isinstance(scaler, scaling.DynamicLossScaler):
            scaler.max_loss_scale = max(scaler.max_loss_scale, scale)
            scaler.min_loss_scale = min(scaler.min_loss_scale, scale)
        scaler.load_state_dict({"loss_scale": scale, "unskipped": scaler.unskipped})


def _scaler_of(owner: Any) -> scaling.LossScaler:
    found: scaling.LossScaler = getattr(owner, "_scaler", owner)
    return found


class PokedStaticScaler(CurScale, scaling.StaticLossScaler):
    """`autoamp.StaticLossScaler` with ``cur_scale``."""


class PokedDynamicScaler(CurScale, scaling.DynamicLossScaler):
    """`autoamp.DynamicLossScaler` with ``cur_scale``, ``scale_factor`` and ``scale_window``."""

    scale_factor = property(attrgetter("growth_factor"), doc="The factor by which the scale grows.")
    scale_window = property(attrgetter("growth_interval"), doc="How many steps without an overflow let the scale grow.")


class LossScaler(CurScale, fp16_utils.LossScaler):
    """`autoamp.fp16_utils.LossScaler` with ``cur_scale``.

    Args:
        scale: The scale.
    """


class DynamicLossScaler(CurScale, fp16_utils.DynamicLossScaler):
    """`autoamp.fp16_utils.DynamicLossScaler` with ``cur_scale``.

    Args:
        init_scale: The first scale.
        scale_factor: The scale is divided by it after an overflow, and multiplied by it after ``scale_window`` steps
            without one.
        scale_window: See ``scale_factor``.
    """
