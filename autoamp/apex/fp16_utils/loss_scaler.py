"""Loss scalers whose caller checks for overflow and updates the scale: the legacy `apex.fp16_utils.loss_scaler`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from autoamp import scaling
from autoamp.scaling import non_finite


class _ByHand:
    """What the legacy scalers have in common.

    The caller runs `backward`, checks with ``has_overflow``, divides the gradients by `loss_scale` and calls
    `update_scale`.
    """

    def __init__(self, scaler: scaling.LossScaler) -> None:
        self._scaler = scaler

    @property
    def loss_scale(self) -> float:
        """The current scale."""
        return self._scaler.loss_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """Return a module's input gradients times the scale: a backward hook of a module."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Tell the scaler, once for each step, whether the gradients overflowed: a dynamic scale moves by that."""
        self._scaler.update(overflow)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of ``loss * loss_scale``, computed in fp32. The gradients stay scaled.

        Args:
            loss: A floating tensor of one element.
            retain_graph: As for ``Tensor.backward``.
        """
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)


class LossScaler(_ByHand):
    """A static scale, which looks for no overflow.

    Args:
        scale: The scale, from 2**-126 to 2**126.

    Raises:
        LossScaleError: ``scale`` is out of that range.
    """

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scaling.StaticLossScaler(scale))

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False, whatever the gradients of ``params`` hold."""
        return False


class DynamicLossScaler(_ByHand):
    """A dynamic scale: divided by a factor after an overflow, multiplied by it after a window without one.

    Args:
        init_scale: The first scale.
        scale_factor: The factor, above 1.
        scale_window: The number of steps without an overflow after which the scale grows.

    Raises:
        LossScaleError: An argument is out of range.
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(
            scaling.DynamicLossScaler(
                init_scale=float(init_scale), growth_factor=scale_factor, backoff_factor=1.0 / scale_factor,
                growth_interval=scale_window, max_loss_scale=2.0**64,
            )
        )  # fmt: skip

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of ``params`` holds inf or nan. Waits for the device."""
        return bool(non_finite((("", p.grad) for p in params if p.grad is not None), limit=1))
