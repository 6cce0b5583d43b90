"""Loss scales that only the device knows, and the factors that follow from them.

A scale is a Python float, or a `DeviceScale` as long as nobody has read it. Both are used through the functions here,
which wait for nothing. What comes out is, bit for bit, what the float would have given.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "ClippedFactor",
    "DeviceFactor",
    "DeviceScale",
    "Factor",
    "Number",
    "Scale",
    "inverse_scale",
    "kernel_factor",
    "multiplied_loss",
    "number_of",
    "scale_ratio",
]


class Number:
    """A loss scale as the host knows it. What waits for it has no need of the tensor.

    Args:
        known: The scale; None as long as the device alone knows it.

    Attributes:
        known: As given, until somebody sets it.
    """

    __slots__ = ("known",)

    def __init__(self, known: float | None = None) -> None:
        self.known = known

    def __format__(self, form: str) -> str:
        return "unknown" if self.known is None else format(self.known, form)


class DeviceScale:
    """A loss scale on a device.

    Args:
        value: fp32, without dimensions. Nobody writes to it any more.
        lowest: The scale is known to be no less.

    Attributes:
        value, lowest: As given.
        number: The scale, once the host knows it.
    """

    __slots__ = ("lowest", "number", "value")

    def __init__(self, value: Tensor, lowest: float) -> None:
        self.value = value
        self.lowest = lowest
        self.number = Number()

    def __float__(self) -> float:
        """Return the number; waits for the device where it is not known."""
        if self.number.known is None:
            self.number.known = float(self.value.item())
        return self.number.known

    def __format__(self, form: str) -> str:
        return format(float(self), form)


Scale: TypeAlias = float | DeviceScale


class DeviceFactor:
    """The quotient of two scales of which the device knows at least one.

    Args:
        above: What is divided.
        below: By what.
        largest: The quotient is known to be no more.
    """

    __slots__ = ("_above", "_below", "_made", "largest")

    def __init__(self, above: Scale, below: Scale, largest: float) -> None:
        self._above = above
        self._below = below
        self._made: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.largest = largest

    def on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the factor as a tensor without dimensions; nothing is waited for.

        Args:
            device: Where it is wanted.
            dtype: fp32 or fp64.
        """
        kind = (device, dtype)
        if kind not in self._made:
            self._made[kind] = self._make(dtype).to(device, non_blocking=True)
        return self._made[kind]

    def _make(self, dtype: torch.dtype) -> Tensor:
        above, below = self._above, self._below
        if dtype is torch.float32:
            # One fp32 operation rounds as the fp64 one does that is rounded to fp32 afterwards.
            if isinstance(below, DeviceScale) and above == 1.0:
                return below.value.reciprocal()
            if isinstance(above, DeviceScale) and below == 1.0:
                return above.value
        like = above.value if isinstance(above, DeviceScale) else below.value  # type: ignore[union-attr]
        return (_double(above, like) / _double(below, like)).to(dtype)


Factor: TypeAlias = float | DeviceFactor


class ClippedFactor(DeviceFactor):
    """The product of a factor and of what gradients are multiplied by so that their norm stays within a limit.

    Args:
        factor: The factor, None for 1.
        coefficient: 0 to 1, in fp32 or fp64, without dimensions. Nobody writes to it any more.
    """

    __slots__ = ("_coefficient", "_factor")

    def __init__(self, factor: Factor | None, coefficient: Tensor) -> None:
        self._factor = factor
        self._coefficient = coefficient
        self._made = {}
        self.largest = factor.largest if isinstance(factor, DeviceFactor) else 1.0 if factor is None else factor

    def _make(self, dtype: torch.dtype) -> Tensor:
        coefficient, factor = self._coefficient.to(dtype), self._factor
        if isinstance(factor, DeviceFactor):
            return coefficient * factor.on(coefficient.device, dtype)
        return coefficient if factor is None else coefficient * factor


def multiplied_loss(loss: Tensor, scale: Scale) -> Tensor:
    """Return ``loss.float() * scale``, of the loss's shape and in fp32; nothing is waited for."""
    if isinstance(scale, DeviceScale):
        return loss.float() * scale.value.to(loss.device, non_blocking=True)
    return loss.float() * scale if scale != 1.0 else loss.float()


def number_of(scale: Scale) -> Number:
    """Return the number of a scale, which is set later where the device alone knows it."""
    return scale.number if isinstance(scale, DeviceScale) else Number(scale)


def inverse_scale(scale: Scale) -> Factor:
    """Return ``1 / scale``."""
    return DeviceFactor(1.0, scale, 1.0 / scale.lowest) if isinstance(scale, DeviceScale) else 1.0 / scale


def scale_ratio(above: Scale, below: Scale) -> Factor:
    """Return ``above / below``."""
    if above is below:
        return 1.0
    if isinstance(above, DeviceScale) or isinstance(below, DeviceScale):
        return DeviceFactor(above, below, float("inf"))
    return above / below


def kernel_factor(factor: Factor | None, device: torch.device) -> dict[str, Any]:
    """Return a factor of gradients on a device as a compiled kernel takes it, by keyword; None for 1."""
    if isinstance(factor, DeviceFactor):
        return {"grad_factor": factor.on(device, torch.float32)}
    return {} if factor is None else {"inv_scale": factor}


def _double(scale: Scale, like: Tensor) -> Tensor:
    if isinstance(scale, DeviceScale):
        return scale.value.to(like.device, torch.float64, non_blocking=True)
    # A tensor too: a number over a tensor is rounded twice.
    return torch.full_like(like, scale, dtype=torch.float64)
