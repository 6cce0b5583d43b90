"""The arguments of `initialize()`: what is refused, and what is warned of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autoamp.errors import UsageError, warn_user
from autoamp.levels.opt_levels import LEVELS, OptLevel
from autoamp.rules import CastTable
from autoamp.stepping import check_half_model, check_half_norms, check_optimizer, is_optimizer, refuse_own_scaler
from autoamp.tensors import HALF_DTYPES
from autoamp.torch_private import is_parallelized

__all__ = [
    "checked_flag",
    "checked_models",
    "checked_optimizers",
    "refuse_sharded",
    "warn_of_settings",
]


def checked_models(models: Any) -> list[Module]:
    """Return the models as a list. UsageError: one is wrapped already, or is no module."""
    found = list(models) if isinstance(models, (list, tuple)) else [models]
    for model in found:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            raise UsageError(
                f"a model is wrapped in {type(model).__name__} already; call initialize() first and wrap what "
                "it returns"
            )
        if not isinstance(model, Module):
            raise UsageError(f"models takes a torch.nn.Module or a list of them, not {type(model).__name__}")
    return found


def refuse_sharded(models: Sequence[Module], opt_level: str) -> None:
    """Raise UsageError for a model that `fully_shard` or `parallelize_module` has distributed, where it is cast."""
    for model in models:
        for name, module in model.named_modules():
            if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
                sharded_by = "fully_shard"
            elif is_parallelized(module):
                sharded_by = "parallelize_module"
            else:
                continue
            raise UsageError(
                f"opt_level={opt_level!r} casts the model, and {sharded_by} has sharded {name or 'it'!r} already, in "
                "the dtype it had; call initialize(model) first, then fully_shard or parallelize_module, then make the "
                "optimizer"
            )


def checked_optimizers(optimizers: Any) -> list[Any]:
    """Return the optimizers as a list. UsageError: one is no optimizer, or scales its losses itself."""
    if optimizers is None:
        return []
    found = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in found:
        if not is_optimizer(optimizer):
            raise UsageError(
                f"optimizers takes an optimizer or a list of them, not {type(optimizer).__name__}: it needs "
                "`param_groups` and `step()`"
            )
        refuse_own_scaler(optimizer)
    return found


def checked_flag(name: str, value: Any) -> bool | None:
    """Return a switch that is a bool or None. UsageError: it is neither."""
    if value is None or isinstance(value, bool):
        return value
    remedy = f"pass opt_level={value!r} by its name" if name == "enabled" and value in tuple(LEVELS) else ""
    raise UsageError(f"{name}={value!r} is not a bool; {remedy or 'choose True, False or None'}")


def warn_of_settings(
    level: OptLevel, models: Sequence[Module], optimizers: Sequence[Any], keep_norms: Any, table: CastTable
) -> None:
    """Warn of arguments that say nothing at this level, and of models and optimizers that it does not suit."""
    if level.cast_model_type is None and not level.master_weights:
        check_half_model(models, level.name)
    if level.cast_model_type in (None, torch.float32) and keep_norms is not None:
        warn_user(
            f"keep_batchnorm_fp32={keep_norms!r} has no effect at opt_level={level.name!r}, which leaves models in fp32"
        )
    if table.modules and level.cast_model_type in ("half", *HALF_DTYPES):
        warn_user(
            f"{table.modules[0].origin}: [modules] has no effect at opt_level={level.name!r}, which casts "
            "whole models; use opt_level='O1' for precision by module"
        )
    check_half_norms(models)
    for optimizer in optimizers:
        check_optimizer(optimizer)
