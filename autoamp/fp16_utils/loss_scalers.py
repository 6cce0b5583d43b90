"""Loss scalers whose caller checks for overflow and updates the scale: the legacy `apex.fp16_utils.loss_scaler`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from autoamp import scaling
from autoamp.scaling import non_finite

__all__ = ["DynamicLossScaler", "LossScaler"]


class _ByHand:
    """What the legacy scalers share: the caller checks for overflow and updates the scale."""

    def __init__(self, scaler: scaling.LossScaler) -> None:
        self._scaler = scaler

    @property
    def loss_scale(self) -> float:
        """The current scale."""
        return self._scaler.loss_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """Multiply a module's input gradients by the scale: a backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Move on by one step."""
        self._scaler.update(overflow)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss. The gradients keep the scale."""
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)


class LossScaler(_ByHand):
    """A static scale. It sees no overflow, as ever.

    Args:
        scale: The scale.
    """

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scaling.StaticLossScaler(scale))

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False."""
        return False


class DynamicLossScaler(_ByHand):
    """A dynamic scale: divided by a factor after an overflow, multiplied by it after a window without one.

    Args:
        init_scale: The first scale.
        scale_factor: The factor.
        scale_window: How many steps without overflow before the scale grows.
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(
            scaling.DynamicLossScaler(
                init_scale=float(init_scale), growth_factor=scale_factor, backoff_factor=1.0 / scale_factor,
                growth_interval=scale_window, max_loss_scale=2.0**64,
            )
        )  # fmt: skip

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Tell whether a gradient of ``params`` holds inf or nan. Waits for the device."""
        return bool(non_finite((("", p.grad) for p in params if p.grad is not None), limit=1))
