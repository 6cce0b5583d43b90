"""`apex.amp.scaler.LossScaler` for programs that call it themselves: a scale, its rule, and what unscales gradients."""

from __future__ import annotations

from autoamp import scaling
from autoamp.apex.amp.state import ScalerView


class LossScaler(ScalerView):
    """A loss scaler whose caller unscales gradients by ``unscale`` and then moves the scale by ``update_scale``.

    Args:
        loss_scale: A number, or ``"dynamic"``.
        init_scale: The first dynamic scale.
        scale_factor: The dynamic scale is divided by it after an overflow, and multiplied by it after ``scale_window``
            updates without one.
        scale_window: See ``scale_factor``.
        min_loss_scale: The lowest dynamic scale.
        max_loss_scale: The highest dynamic scale.

    Raises:
        LossScaleError: An argument is out of range. It is a ValueError.
    """

    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False
    has_fused_kernel = True

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        scaler: scaling.LossScaler
        if loss_scale == "dynamic":
            scaler = scaling.DynamicLossScaler(
                min(init_scale, max_loss_scale), scale_factor, 1.0 / scale_factor, scale_window, min_loss_scale,
                max_loss_scale,
            )  # fmt: skip
        else:
            scaler = scaling.StaticLossScaler(float(loss_scale))
        super().__init__(scaler)

    @property
    def _has_overflow(self) -> bool:
        return bool(self._overflow_buf.any())

    @_has_overflow.setter
    def _has_overflow(self, overflow: bool) -> None:
        self._overflow_buf.fill_(overflow)

    def update_scale(self) -> bool:
        """Move the scale by what was found, and tell whether the step is to be skipped: never for a static scale."""
        overflow = self._has_overflow
        self._scaler.update(overflow)
        return overflow and self.dynamic
