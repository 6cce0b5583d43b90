"""The loss scale and the rule for its next value.

A loss that is multiplied by a scale gives gradients that are multiplied by it too, so small ones survive the range of
half precision. The scale is a Python float: reading it never waits for a device.

- `StaticLossScaler`: one scale for the whole run.
- `DynamicLossScaler`: lower after an overflow, higher after a long time without one.
- `make_scaler`: the scaler for a ``loss_scale=`` argument.
"""

from __future__ import annotations

import ctypes
import math
import numbers
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from autoamp.errors import AutoampError, CheckpointError

__all__ = ["DynamicLossScaler", "LossScaleError", "LossScaler", "StaticLossScaler", "make_scaler", "open_blocks"]

# Between these two the scale and its reciprocal are both normal fp32 numbers. A subnormal one may be flushed to 0.
_SMALLEST = 2.0**-126
_LARGEST = 2.0**126


class _OpenBlocks(threading.local):
    """How many blocks a thread is in within which the program scales its loss."""

    count = 0


open_blocks = _OpenBlocks()


class LossScaleError(AutoampError, ValueError):
    """A loss scale, or an argument of its rule, that cannot be used."""


class LossScaler(ABC):
    """The scale of one loss. `update` is told once a step whether the gradients overflowed."""

    def __init__(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        self._unskipped = 0

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss: finite and above 0."""
        return self._loss_scale

    @property
    def unskipped(self) -> int:
        """How many updates without an overflow came since the last overflow, or since the scale last grew."""
        return self._unskipped

    @property
    @abstractmethod
    def checks(self) -> bool:
        """Whether gradients must be unscaled and looked through for inf and nan at all."""

    @abstractmethod
    def update(self, found_inf: bool) -> None:
        """Move on by one step.

        Args:
            found_inf: Whether a gradient of this step held inf or nan.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"loss_scale": float, "unskipped": int}``, all that a resumed run needs."""
        return {"loss_scale": self._loss_scale, "unskipped": self._unskipped}

    def check_state_dict(self, state_dict: Any, key: str) -> None:
        """Raise unless `load_state_dict` would take this state.

        Args:
            state_dict: What `state_dict` returned, perhaps in another process.
            key: The name of this entry in the whole checkpoint, for the message.

        Raises:
            CheckpointError: An entry is missing, unknown or of a wrong kind; the message names it.
        """
        _read_state(state_dict, key)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the scale and the count of a checkpoint; the checkpoint's scale wins over the one given here.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            CheckpointError: As `check_state_dict`; nothing was changed then.
        """
        self._loss_scale, self._unskipped = _read_state(state_dict, "loss_scaler")


class StaticLossScaler(LossScaler):
    """A scale that never changes. A step that overflows is skipped all the same.

    With the scale 1.0 there is nothing to unscale, so nothing is checked either: training runs as if without amp,
    without a pass over the gradients and without waiting for the device. That is what bf16 takes by default, whose
    range is that of fp32.

    Args:
        loss_scale: A number from 2**-126 to 2**126.

    Raises:
        LossScaleError: ``loss_scale`` is no such number.
    """

    def __init__(self, loss_scale: float = 1.0) -> None:
        super().__init__(_scale_argument("loss_scale", loss_scale))

    @property
    def checks(self) -> bool:
        """False for the scale 1.0 alone."""
        return self._loss_scale != 1.0

    def update(self, found_inf: bool) -> None:
        """Count the steps without an overflow. See `LossScaler.update`."""
        self._unskipped = 0 if found_inf else self._unskipped + 1

    def __repr__(self) -> str:
        return f"StaticLossScaler(loss_scale={self._loss_scale!r})"


class DynamicLossScaler(LossScaler):
    """The rule of `torch.amp.GradScaler`, in its arithmetic (fp32), within limits.

    After an overflow the scale is multiplied by ``backoff_factor``; after ``growth_interval`` updates in a row without
    one, by ``growth_factor``. It stays in ``[min_loss_scale, max_loss_scale]``, the first value included.

    Args:
        init_scale: The first scale.
        growth_factor: Above 1.
        backoff_factor: Between 0 and 1.
        growth_interval: A whole number of updates, at least 1.
        min_loss_scale: The lower limit; None is 2**-126, the smallest normal fp32 number.
        max_loss_scale: The upper limit; None is 2**126.

    Raises:
        LossScaleError: An argument is outside these rules.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> None:
        init_scale = _scale_argument("init_scale", init_scale)
        self.growth_factor = _number("growth_factor", growth_factor, "a number above 1, such as 2.0")
        self.backoff_factor = _number("backoff_factor", backoff_factor, "a number between 0 and 1, such as 0.5")
        self.min_loss_scale = _SMALLEST if min_loss_scale is None else _scale_argument("min_loss_scale", min_loss_scale)
        self.max_loss_scale = _LARGEST if max_loss_scale is None else _scale_argument("max_loss_scale", max_loss_scale)
        if not 1.0 < self.growth_factor < math.inf:
            raise LossScaleError(f"growth_factor={growth_factor!r} must be above 1 and finite; 2.0 is usual")
        if not 0.0 < self.backoff_factor < 1.0:
            raise LossScaleError(f"backoff_factor={backoff_factor!r} must lie between 0 and 1; 0.5 is usual")
        if not _is_integer(growth_interval) or growth_interval < 1:
            raise LossScaleError(f"growth_interval={growth_interval!r} must be a whole number of steps, at least 1")
        if self.min_loss_scale > self.max_loss_scale:
            raise LossScaleError(
                f"min_loss_scale={min_loss_scale!r} is above max_loss_scale={max_loss_scale!r}; lower the first"
            )
        self.growth_interval = int(growth_interval)
        super().__init__(self._within_limits(_fp32(init_scale)))

    @property
    def checks(self) -> bool:
        """Always True: the rule lives on the checks."""
        return True

    def update(self, found_inf: bool) -> None:
        """Lower the scale, or count towards the next growth. See `LossScaler.update`."""
        if found_inf:
            self._loss_scale = self._within_limits(_fp32(self._loss_scale * self.backoff_factor))
            self._unskipped = 0
            return
        self._unskipped += 1
        # A checkpoint of a longer interval may have brought a count beyond this one's.
        if self._unskipped >= self.growth_interval:
            self._loss_scale = self._within_limits(_fp32(self._loss_scale * self.growth_factor))
            self._unskipped = 0

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the scale, moved into this scaler's limits, and the count. See `LossScaler.load_state_dict`."""
        super().load_state_dict(state_dict)
        self._loss_scale = self._within_limits(_fp32(self._loss_scale))

    def _within_limits(self, scale: float) -> float:
        return min(max(scale, self.min_loss_scale), self.max_loss_scale)

    def __repr__(self) -> str:
        return (
            f"DynamicLossScaler(loss_scale={self._loss_scale!r}, growth_factor={self.growth_factor!r}, "
            f"backoff_factor={self.backoff_factor!r}, growth_interval={self.growth_interval!r}, "
            f"min_loss_scale={self.min_loss_scale!r}, max_loss_scale={self.max_loss_scale!r})"
        )


def make_scaler(
    loss_scale: float | str | LossScaler | None,
    dtype: torch.dtype,
    *,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
) -> LossScaler:
    """Return the scaler that a ``loss_scale=`` argument asks for.

    Args:
        loss_scale: None (dynamic for fp16, 1.0 for any other dtype), ``"dynamic"``, a number, a number as a string
            (as command lines give it), or a scaler, which is returned as it is.
        dtype: The half dtype in use.
        min_loss_scale: The lower limit of a dynamic scaler made here.
        max_loss_scale: The upper limit of a dynamic scaler made here.

    Raises:
        LossScaleError: ``loss_scale`` is none of these.
    """
    if isinstance(loss_scale, LossScaler):
        return loss_scale
    if loss_scale is None:
        loss_scale = "dynamic" if dtype == torch.float16 else 1.0
    if isinstance(loss_scale, str):
        if loss_scale.strip().lower() == "dynamic":
            return DynamicLossScaler(min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        try:
            loss_scale = float(loss_scale)
        except ValueError:
            raise LossScaleError(
                f"loss_scale={loss_scale!r} is unknown; choose 'dynamic', a number such as 128.0, or None"
            ) from None
    return StaticLossScaler(loss_scale)


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _number(name: str, value: Any, rule: str) -> float:
    if not _is_number(value):
        raise LossScaleError(f"{name}={value!r} is not a number; give {rule}")
    return float(value)


def _scale_argument(name: str, value: Any) -> float:
    scale = _number(name, value, "a number above 0, such as 128.0")
    # Written so that nan fails too.
    if not _SMALLEST <= scale <= _LARGEST:
        raise LossScaleError(
            f"{name}={value!r} is no usable scale: it must be above 0, from 2**-126 to 2**126; 128.0 is usual"
        )
    return scale


def _read_state(state_dict: Any, key: str) -> tuple[float, int]:
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(
            f"{key!r} is a {type(state_dict).__name__}, no dict with 'loss_scale' and 'unskipped'; nothing was loaded"
        )
    for name in ("loss_scale", "unskipped"):
        if name not in state_dict:
            raise CheckpointError(f"{key!r} has no entry {name!r}, so it is torn or foreign; nothing was loaded")
    unknown = sorted(str(name) for name in state_dict if name not in ("loss_scale", "unskipped"))
    if unknown:
        raise CheckpointError(f"{key!r} has the unknown entry {unknown[0]!r}; nothing was loaded")
    scale, unskipped = state_dict["loss_scale"], state_dict["unskipped"]
    # Compared as it is: a whole number may be too large for a float.
    if not _is_number(scale) or not _SMALLEST <= scale <= _LARGEST:
        raise CheckpointError(
            f"{key!r}: 'loss_scale' is {scale!r}, not a finite number from 2**-126 to 2**126; nothing was loaded"
        )
    if not _is_integer(unskipped) or unskipped < 0:
        raise CheckpointError(f"{key!r}: 'unskipped' is {unskipped!r}, no whole number from 0 on; nothing was loaded")
    return float(scale), int(unskipped)
