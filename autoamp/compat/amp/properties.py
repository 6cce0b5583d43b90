"""`apex.amp.frontend.Properties` and its opt levels, and the strings that command lines put in the place of values."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from autoamp.compat.alias import options
from autoamp.errors import UsageError
from autoamp.levels import LEVELS
from autoamp.tensors import HALF_DTYPES

__all__ = ["O0", "O1", "O2", "O3", "Properties", "as_flag", "as_number", "as_scale", "as_type", "opt_levels"]

_FLAGS = {
    None: None, True: True, False: False, "True": True, "False": False, "None": None, "": None,
    "true": True, "false": False, "1": True, "0": False,
}  # fmt: skip


def as_flag(name: str, value: Any) -> bool | None:
    """Return a switch as a bool or None; ``"True"`` and the like come from command lines.

    Raises:
        UsageError: It is neither a bool nor the name of one.
    """
    if isinstance(value, Hashable) and value in _FLAGS:
        return _FLAGS[value]
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


class Properties:
    """What an opt level came to. Options are read and written as attributes.

    Attributes:
        options: The options by name.
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        start = {
            "enabled": False, "opt_level": None, "cast_model_type": None, "patch_torch_functions": False,
            "keep_batchnorm_fp32": None, "master_weights": None, "loss_scale": 1.0,
        }  # fmt: skip
        object.__setattr__(self, "options", start)

    def _update_options_dict(self, new_options: dict[str, Any]) -> None:
        for name, value in new_options.items():
            if name not in self.options:
                raise ValueError(f"there is no option {name!r}; choose among {', '.join(self.options)}")
            self.options[name] = value

    def __getattr__(self, name: str) -> Any:
        if name != "options" and name in self.options:
            return self.options[name]
        raise AttributeError(f"'Properties' object has no attribute {name!r}", name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            object.__setattr__(self, name, value)
        elif name == "loss_scale":
            self.options[name] = as_scale(value)
        elif name == "cast_model_type":
            self.options[name] = as_type(value)
        elif name == "opt_level":
            self.options[name] = value
        else:
            self.options[name] = as_flag(name, value)

    def __repr__(self) -> str:
        return f"Properties({self.options})"


class _Level:
    """An opt level that fills in properties: ``opt_levels["O2"](Properties())``."""

    name: str
    brief: str
    more: str = "See docs/opt_levels.md."

    def __call__(self, properties: Properties) -> Properties:
        """Write what this level stands for, in the half dtype of the alias, into ``properties``; returned too."""
        level = LEVELS[self.name]
        kind = options().dtype if level.cast_model_type == "half" else level.cast_model_type
        properties.enabled = True
        properties.opt_level = self.name
        properties.cast_model_type = kind
        properties.patch_torch_functions = level.patch_torch_functions
        properties.keep_batchnorm_fp32 = level.keep_batchnorm_fp32 if kind in HALF_DTYPES else None
        properties.master_weights = None if self.name == "O1" else level.master_weights
        properties.loss_scale = "dynamic" if level.loss_scale is None else level.loss_scale
        return properties


class O0(_Level):
    """fp32."""

    name, brief = "O0", "O0:  Pure FP32 training."


class O1(_Level):
    """torch is patched by the cast lists."""

    name, brief = "O1", "O1:  Insert automatic casts around Pytorch functions and Tensor methods."


class O2(_Level):
    """Models in half precision, norms and master weights in fp32."""

    name, brief = "O2", "O2:  FP16 training with FP32 batchnorm and FP32 master weights."


class O3(_Level):
    """Models in half precision."""

    name, brief = "O3", "O3:  Pure FP16 training."


opt_levels: dict[str, _Level] = {"O3": O3(), "O2": O2(), "O1": O1(), "O0": O0()}
