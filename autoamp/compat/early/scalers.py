"""The scalers of `apex.fp16_utils` and of its `FP16_Optimizer`, by the names that programs read and write inside."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from autoamp import fp16_utils
from autoamp.scaling import DynamicLossScaler as NativeDynamicScaler
from autoamp.scaling import LossScaler as NativeScaler
from autoamp.scaling import StaticLossScaler, non_finite

__all__ = ["DynamicLossScaler", "LossScaler", "PokedDynamicScaler", "PokedStaticScaler"]


def _poke(scaler: NativeScaler, scale: float) -> None:
    """Set a scale, any that is usable at all: a dynamic scaler's limits hold for its own moves, as in Apex."""
    scale = StaticLossScaler(float(scale)).loss_scale
    if isinstance(scaler, NativeDynamicScaler):
        scaler.max_loss_scale = max(scaler.max_loss_scale, scale)
        scaler.min_loss_scale = min(scaler.min_loss_scale, scale)
    scaler.load_state_dict({"loss_scale": scale, "unskipped": scaler.unskipped})


class _Poked(NativeScaler):
    """A scaler whose scale is also read and written as ``cur_scale``."""

    @property
    def cur_scale(self) -> float:
        """The scale for the next loss; writing it takes effect."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        _poke(self, scale)


class PokedStaticScaler(_Poked, StaticLossScaler):
    """`autoamp.StaticLossScaler` with ``cur_scale``."""


class PokedDynamicScaler(_Poked, NativeDynamicScaler):
    """`autoamp.DynamicLossScaler` with ``cur_scale``, ``scale_factor`` and ``scale_window``."""

    @property
    def scale_factor(self) -> float:
        """By what the scale grows and shrinks."""
        return self.growth_factor

    @property
    def scale_window(self) -> int:
        """After so many steps without an overflow the scale grows."""
        return self.growth_interval


class LossScaler(fp16_utils.LossScaler):
    """`autoamp.fp16_utils.LossScaler` with ``cur_scale``.

    Args:
        scale: The scale.
    """

    @property
    def cur_scale(self) -> float:
        """The scale; writing it takes effect."""
        return self._scaler.loss_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        _poke(self._scaler, scale)

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return False


class DynamicLossScaler(fp16_utils.DynamicLossScaler):
    """`autoamp.fp16_utils.DynamicLossScaler` with ``cur_scale`` and the old names of its check.

    Args:
        init_scale: The first scale.
        scale_factor: The factor.
        scale_window: How many steps without overflow before the scale grows.
    """

    @property
    def cur_scale(self) -> float:
        """The scale; writing it takes effect."""
        return self._scaler.loss_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        _poke(self._scaler, scale)

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Do what ``has_overflow`` does; the name is from when there was one for several processes as well."""
        return self.has_overflow(params)

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return bool(non_finite([("", x)], limit=1))
