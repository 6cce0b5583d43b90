"""The options of `autoamp run`, as plain values that its child processes get as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from autoamp.errors import UsageError
from autoamp.levels import LevelName
from autoamp.runtime import OnNonfinite
from autoamp.scaling import StaticLossScaler

DTYPES = {"fp16": torch.float16, "float16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """The options of `autoamp run`: plain values, since children get them as JSON.

    Attributes:
        dtype: A key of `DTYPES`. None is bf16 or fp16 where the device has units for it, in this order, else fp32; and
            fp16 for a program of Apex.
        device_type: As for `autoamp.init`.
        lists: List sets and files, on top of the project's own.
        opt_level: ``"O1"`` patches torch and scales losses. The others act where the program calls ``initialize``.
        loss_scale: ``"dynamic"``, or a number in digits. None is `autoamp.init`'s choice.
        apex: Whether ``import apex`` finds autoamp.
        shadow_apex: Whether a real `apex` is hidden.
        fastai1: Whether fastai v1 is made to run on today's torch.
        trace_overflow: Whether skipped steps are explained, in the log.
        capsule: As for `autoamp.init`.
        keep_memory: Whether freed memory is kept where the run computes on a CPU.
        on_nonfinite: As for `autoamp.init`.
    """

    dtype: str | None = None
    device_type: str | None = None
    lists: list[str] = field(default_factory=list)
    opt_level: LevelName = "O1"
    loss_scale: str | None = None
    apex: bool = True
    shadow_apex: bool = False
    fastai1: bool = False
    trace_overflow: bool = False
    capsule: str | None = None
    keep_memory: bool = True
    on_nonfinite: OnNonfinite = "warn"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Options:
        """Take the options out of a mapping that may have more, such as a parsed command line or JSON."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})

    def as_dict(self) -> dict[str, Any]:
        """Return the options as JSON has them."""
        return asdict(self)


def loss_scale_of(text: str | None) -> Any:
    """Return the ``loss_scale`` for `autoamp.init`.

    Raises:
        UsageError: This is neither ``"dynamic"`` nor a number.
    """
    if text is None or text == "dynamic":
        return text
    try:
        return StaticLossScaler(float(text)).loss_scale
    except ValueError:
        raise UsageError(f"--loss-scale {text!r}: expected 'dynamic' or a number above 0") from None
