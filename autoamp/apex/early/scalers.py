"""The scalers of `apex.fp16_utils` and of its `FP16_Optimizer`, with the attributes that programs read and write."""

from __future__ import annotations

from typing import Any

from autoamp import scaling
from autoamp.apex import fp16_utils


class CurScale:
    """A scaler, or what has one as ``_scaler``, whose scale and rule are read and written by their early names too.

    A static scale has no rule: AttributeError. LossScaleError: no scaler takes what is written.
    """

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

    @property
    def scale_factor(self) -> float:
        """An overflow divides the scale by it; ``scale_window`` steps without one multiply the scale by it."""
        return self._dynamic("scale_factor").growth_factor

    @scale_factor.setter
    def scale_factor(self, factor: float) -> None:
        scaler, factor = self._dynamic("scale_factor"), scaling.DynamicLossScaler(growth_factor=factor).growth_factor
        scaler.growth_factor, scaler.backoff_factor = factor, 1.0 / factor

    @property
    def scale_window(self) -> int:
        """How many steps without an overflow let the scale grow."""
        return self._dynamic("scale_window").growth_interval

    @scale_window.setter
    def scale_window(self, window: int) -> None:
        scaler = self._dynamic("scale_window")
        scaler.growth_interval = scaling.DynamicLossScaler(growth_interval=window).growth_interval
        _count_from(scaler, scaler.unskipped)

    def _dynamic(self, name: str) -> scaling.DynamicLossScaler:
        scaler = _scaler_of(self)
        if not isinstance(scaler, scaling.DynamicLossScaler):
            raise AttributeError(
                f"a static loss scale has no {name!r}; build it with dynamic_loss_scale=True", name=name
            )
        return scaler


class Iterations(CurScale):
    """`CurScale` of what knows how many steps it took as ``_steps``, with the early names for that count."""

    _steps: Any
    _first = 0

    @property
    def cur_iter(self) -> int:
        """How many steps there were, skips included."""
        return int(self._first + self._steps)

    @cur_iter.setter
    def cur_iter(self, count: int) -> None:
        self._first = int(count) - self._steps

    @property
    def last_overflow_iter(self) -> int:
        """The step from which the next growth is counted: that of the last overflow, or at which the scale last grew.

        -1 if there was none. `cur_iter` is to be written before it.
        """
        return self.cur_iter - 1 - self._dynamic("last_overflow_iter").unskipped

    @last_overflow_iter.setter
    def last_overflow_iter(self, step: int) -> None:
        _count_from(self._dynamic("last_overflow_iter"), self.cur_iter - 1 - int(step))


def _scaler_of(owner: Any) -> scaling.LossScaler:
    found: scaling.LossScaler = getattr(owner, "_scaler", owner)
    return found


def _count_from(scaler: scaling.DynamicLossScaler, unskipped: int) -> None:
    """Let the next growth be counted from so many steps ago. Growths since then have happened."""
    unskipped = max(unskipped, 0) % scaler.growth_interval
    scaler.load_state_dict({"loss_scale": scaler.loss_scale, "unskipped": unskipped})


class PokedStaticScaler(CurScale, scaling.StaticLossScaler):
    """`autoamp.StaticLossScaler` with ``cur_scale``."""


class PokedDynamicScaler(CurScale, scaling.DynamicLossScaler):
    """`autoamp.DynamicLossScaler` with ``cur_scale``, ``scale_factor`` and ``scale_window``."""


class LossScaler(CurScale, fp16_utils.LossScaler):
    """`autoamp.fp16_utils.LossScaler` with ``cur_scale``.

    Args:
        scale: The scale.
    """


class DynamicLossScaler(Iterations, fp16_utils.DynamicLossScaler):
    """`autoamp.fp16_utils.DynamicLossScaler` with the attributes of `Iterations`.

    Args:
        init_scale: The first scale.
        scale_factor: The scale is divided by it after an overflow, and multiplied by it after ``scale_window`` steps
            without one.
        scale_window: See ``scale_factor``.
    """

    _steps = 0

    def update_scale(self, overflow: bool) -> None:
        """Count a step, and move the scale. See `autoamp.fp16_utils.DynamicLossScaler.update_scale`."""
        self._steps += 1
        super().update_scale(overflow)
