"""`apex.amp.frontend.Properties` and its opt levels, and the strings that command lines put in the place of values."""

from __future__ import annotations

import types
from typing import Any

import torch

from autoamp.apex.alias import options
from autoamp.apex.levels import LEVELS
from autoamp.errors import UsageError
from autoamp.tensors import HALF_DTYPES

_FLAGS = {"true": True, "1": True, "false": False, "0": False, "none": None, "": None}


def as_flag(name: str, value: Any) -> bool | None:
    """Return a switch as a bool or None; ``"True"`` and the like come from command lines.

    Raises:
        UsageError: It is neither a bool nor the name of one.
    """
    text = str(bool(value) if isinstance(value, (int, float)) and value in (0, 1) else value).lower()
    if text in _FLAGS:
        return _FLAGS[text]
    raise UsageError(f"{name}={value!r} is not a bool; choose True, False or None")


def as_number(name: str, value: Any) -> Any:
    """Return a number that may stand in a string, and whatever else as it is.

    Raises:
        UsageError: The string is no number.
    """
    if not isinstance(value, str):
        return value
    if value in ("", "None"):
        return None
    try:
        number = float(value)
    except ValueError:
        raise UsageError(f"{name}={value!r} is not a number; pass one such as 128.0") from None
    return int(number) if number.is_integer() and "." not in value else number


def as_scale(value: Any) -> Any:
    """Return a loss scale: None, ``"dynamic"`` or a number, which may stand in a string."""
    is_dynamic = isinstance(value, str) and value.strip().lower() == "dynamic"
    return "dynamic" if is_dynamic else as_number("loss_scale", value)


def as_type(value: Any) -> Any:
    """Return a ``cast_model_type``: a dtype, False for none, or None; each may be given by its name."""
    if isinstance(value, str):
        found = getattr(torch, value.removeprefix("torch."), None)
        return found if isinstance(found, torch.dtype) else as_flag("cast_model_type", value)
    return value


class Properties(types.SimpleNamespace):
    """What an opt level came to. Options are read and written as attributes."""

    def __init__(self) -> None:
        super().__init__(
            enabled=False, opt_level=None, cast_model_type=None, patch_torch_functions=False,
            keep_batchnorm_fp32=None, master_weights=None, loss_scale=1.0,
        )  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        """The options by name."""
        return vars(self)


def fill(properties: Properties, level: Any, half: torch.dtype) -> Properties:
    """Write what a level stands for, in a half dtype, into properties, and return these."""
    kind = half if level.cast_model_type == "half" else level.cast_model_type
    properties.enabled = True
    properties.opt_level = level.name
    properties.cast_model_type = kind
    properties.patch_torch_functions = level.patch_torch_functions
    # None where the level has no say and the call asked for nothing.
    properties.keep_batchnorm_fp32 = level.keep_batchnorm_fp32 or (False if kind in HALF_DTYPES else None)
    properties.master_weights = level.master_weights or (None if level.name == "O1" else False)
    properties.loss_scale = "dynamic" if level.loss_scale is None else level.loss_scale
    return properties


class _OptLevel:
    """A level that writes what it stands for into `Properties`, in the alias's half dtype."""

    brief = more = ""

    def __call__(self, properties: Properties) -> Properties:
        return fill(properties, LEVELS[type(self).__name__], options().dtype)


class O0(_OptLevel):
    """Plain fp32."""

    brief, more = "O0: fp32 training.", "The model stays in fp32, and torch is not patched."


class O1(_OptLevel):
    """Casts by lists."""

    brief, more = (
        "O1: casts around torch's functions.",
        "The model stays in fp32; lists say what runs in half.",
    )


class O2(_OptLevel):
    """A half model with fp32 masters."""

    brief, more = "O2: a half model.", "Batch norms stay in fp32, and the optimizer steps fp32 master weights."


class O3(_OptLevel):
    """A half model."""

    brief, more = "O3: a half model.", "Batch norms are half too, and the optimizer steps the half weights."


opt_levels: dict[str, _OptLevel] = {"O3": O3(), "O2": O2(), "O1": O1(), "O0": O0()}
