"""Loss scalers whose caller checks for overflow and updates the scale: the legacy `apex.fp16_utils.loss_scaler`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from autoamp import core
from autoamp.apex.fp16_utils.fp16util import to_python_float
from autoamp.core import non_finite


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
        scaler, scale = _scaler_of(self), core.StaticLossScaler(float(scale)).loss_scale
        if isinstance(scaler, core.DynamicLossScaler):
            scaler.max_loss_scale = max(scaler.max_loss_scale, scale)
            scaler.min_loss_scale = min(scaler.min_loss_scale, scale)
        scaler.load_state_dict({"loss_scale": scale, "unskipped": scaler.unskipped})

    @property
    def scale_factor(self) -> float:
        """An overflow divides the scale by it; ``scale_window`` steps without one multiply the scale by it."""
        return self._dynamic("scale_factor").growth_factor

    @scale_factor.setter
    def scale_factor(self, factor: float) -> None:
        scaler, factor = self._dynamic("scale_factor"), core.DynamicLossScaler(growth_factor=factor).growth_factor
        scaler.growth_factor, scaler.backoff_factor = factor, 1.0 / factor

    @property
    def scale_window(self) -> int:
        """How many steps without an overflow let the scale grow."""
        return self._dynamic("scale_window").growth_interval

    @scale_window.setter
    def scale_window(self, window: int) -> None:
        scaler = self._dynamic("scale_window")
        scaler.growth_interval = core.DynamicLossScaler(growth_interval=window).growth_interval
        _count_from(scaler, scaler.unskipped)

    def _dynamic(self, name: str) -> core.DynamicLossScaler:
        scaler = _scaler_of(self)
        if not isinstance(scaler, core.DynamicLossScaler):
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


def _scaler_of(owner: Any) -> core.LossScaler:
    found: core.LossScaler = getattr(owner, "_scaler", owner)
    return found


def _count_from(scaler: core.DynamicLossScaler, unskipped: int) -> None:
    """Let the next growth be counted from so many steps ago. Growths since then have happened."""
    unskipped = max(unskipped, 0) % scaler.growth_interval
    scaler.load_state_dict({"loss_scale": scaler.loss_scale, "unskipped": unskipped})


class PokedStaticScaler(CurScale, core.StaticLossScaler):
    """`autoamp.StaticLossScaler` with ``cur_scale``."""


class PokedDynamicScaler(CurScale, core.DynamicLossScaler):
    """`autoamp.DynamicLossScaler` with ``cur_scale``, ``scale_factor`` and ``scale_window``."""


class _ByHand:
    """What the legacy scalers have in common.

    The caller runs `backward`, checks with ``has_overflow``, divides the gradients by `loss_scale` and calls
    `update_scale`.
    """

    def __init__(self, scaler: core.LossScaler) -> None:
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


class LossScaler(CurScale, _ByHand):
    """A static scale, which looks for no overflow.

    Args:
        scale: The scale, from 2**-126 to 2**126.

    Raises:
        LossScaleError: ``scale`` is out of that range.
    """

    def __init__(self, scale: float = 1) -> None:
        super().__init__(core.StaticLossScaler(scale))

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False, whatever the gradients of ``params`` hold."""
        return False


class DynamicLossScaler(Iterations, _ByHand):
    """A dynamic scale: divided by a factor after an overflow, multiplied by it after a window without one.

    Args:
        init_scale: The first scale.
        scale_factor: The factor, above 1.
        scale_window: The number of steps without an overflow after which the scale grows.

    Raises:
        LossScaleError: An argument is out of range.
    """

    _steps = 0

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        rule = (scale_factor, 1.0 / scale_factor, scale_window)
        super().__init__(core.DynamicLossScaler(float(init_scale), *rule, max_loss_scale=2.0**64))

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of ``params`` holds inf or nan. Waits for the device."""
        return bool(non_finite((("", p.grad) for p in params if p.grad is not None), limit=1))

    def update_scale(self, overflow: bool) -> None:
        """Count a step, and move the scale by whether its gradients overflowed."""
        self._steps += 1
        super().update_scale(overflow)
