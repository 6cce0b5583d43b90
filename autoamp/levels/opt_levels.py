"""The opt levels O0 to O3: what each means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from autoamp.errors import UsageError
from autoamp.tensors import HALF_DTYPES

LevelName = Literal["O0", "O1", "O2", "O3"]


@dataclass(frozen=True)
class OptLevel:
    """What an opt level stands for. Every property can be overridden in the call of `initialize`.

    Attributes:
        name: ``"O0"`` to ``"O3"``.
        cast_model_type: The dtype that models are cast to: ``torch.float32``, a half dtype, ``"half"`` for the half
            dtype in use, or None to leave them.
        patch_torch_functions: Whether torch is patched by the cast lists.
        keep_batchnorm_fp32: Whether norms with running statistics stay in fp32 where the model is cast.
        master_weights: Whether optimizers step fp32 copies of half parameters.
        loss_scale: ``"dynamic"``, a number, or None for what `init` takes: dynamic for fp16, 1.0 for bf16.
    """

    name: str
    cast_model_type: torch.dtype | str | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool
    master_weights: bool
    loss_scale: Any

    @property
    def casts_models(self) -> bool:
        """Whether models are cast to a half dtype."""
        return self.cast_model_type in ("half", *HALF_DTYPES)


LEVELS = {
    "O0": OptLevel("O0", torch.float32, False, False, False, 1.0),
    "O1": OptLevel("O1", None, True, False, False, None),
    "O2": OptLevel("O2", "half", False, True, True, None),
    "O3": OptLevel("O3", "half", False, False, False, 1.0),
}


def check_level(opt_level: Any) -> None:
    """Raise UsageError for what is no level."""
    if opt_level not in tuple(LEVELS):
        raise UsageError(
            f"opt_level={opt_level!r} is unknown; choose 'O0', 'O1', 'O2' or 'O3', which begin with the letter O, "
            "not the digit 0"
        )


def level_with(opt_level: str, **overrides: Any) -> OptLevel:
    """Return a level with the properties that the call overrides. UsageError: they contradict one another."""
    check_level(opt_level)
    level = replace(LEVELS[opt_level], **{name: value for name, value in overrides.items() if value is not None})
    if overrides["cast_model_type"] is False:
        level = replace(level, cast_model_type=None)
    kind = level.cast_model_type
    if kind not in (None, "half", torch.float32, *HALF_DTYPES):
        raise UsageError(
            f"cast_model_type={kind!r}; choose torch.float16, torch.bfloat16, torch.float32, False or None"
        )
    if level.patch_torch_functions and kind not in (None, torch.float32):
        raise UsageError(
            f"patch_torch_functions=True casts fp32 parameters as they are used, and cast_model_type={kind!r} leaves "
            "none; choose one of the two"
        )
    return level
