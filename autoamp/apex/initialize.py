"""`initialize()`, and the functions that act on the handle it sets up."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autoamp.apex.levels import LEVELS, LevelName, OptLevel, Setup, check_half_norms, end, level_with, set_up
from autoamp.core import (
    CastTable,
    LossScaler,
    OnNonfinite,
    RequestedGroup,
    Settings,
    as_list,
    check_device,
    current_runtime,
    expand,
    half_model_table,
    is_count,
    make_scaler,
    needed_handle,
    refuse_inner_groups,
    refuse_unguardable,
)
from autoamp.errors import UsageError, kind_of, warn_user
from autoamp.half_units import falls_back_to_fp32, half_dtype
from autoamp.tensors import HALF_DTYPES
from autoamp.torch_private import MODULES_OF_NORMS, is_parallelized

log = logging.getLogger(__name__)

# One module, or several; and what is given comes back as it is.
Models = TypeVar("Models", bound="Module | Sequence[Module]")
Optimizers = TypeVar("Optimizers")
P = ParamSpec("P")


class _Initialize(Protocol[P]):
    """What a type checker knows of `initialize`: it returns what it was given."""

    @overload
    def __call__(self, models: Models, optimizers: None = None, *others: P.args, **named: P.kwargs) -> Models: ...
    @overload
    def __call__(
        self, models: Models, optimizers: Optimizers, *others: P.args, **named: P.kwargs
    ) -> tuple[Models, Optimizers]: ...


def _returns_its_arguments(function: Callable[Concatenate[Any, Any, P], Any]) -> _Initialize[P]:
    return cast("_Initialize[P]", function)


@_returns_its_arguments
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool | None = True,
    opt_level: LevelName = "O1",
    cast_model_type: torch.dtype | Literal[False] | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | None = None,
    master_weights: bool | None = None,
    loss_scale: float | Literal["dynamic"] | LossScaler | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    scope: Literal["global", "models"] = "global",
    dtype: torch.dtype | Literal["fp16", "float16", "bf16", "bfloat16"] | None = None,
    device_type: str | None = None,
    lists: Any = None,
    trace_overflow: bool = False,
    on_nonfinite: OnNonfinite = "warn",
    process_group: Any = None,
) -> Any:
    """Set models and optimizers up for mixed precision at an opt level.

    If an earlier call set up one of these models or optimizers, that setup is undone first. Models and optimizers of
    earlier calls that are not passed again keep their setup.

    Args:
        models: A module or a list of modules, in fp32, not yet wrapped in DataParallel or DistributedDataParallel.
        optimizers: An optimizer, a list of them, or None for inference.
        enabled: False ends earlier calls and returns the arguments; ``scale_loss`` yields the unchanged loss.
        opt_level: ``"O0"``: fp32. ``"O1"``: torch is patched by the cast lists. ``"O2"``: models in half precision,
            norms and master weights in fp32. ``"O3"``: models in half precision.
        cast_model_type: Overrides that of the level. False casts neither models nor their inputs and outputs.
        patch_torch_functions: Overrides that of the level.
        keep_batchnorm_fp32: Overrides that of the level. It has no effect if the model is not cast.
        master_weights: Overrides that of the level.
        loss_scale: Overrides that of the level: a number or ``"dynamic"``.
        cast_model_outputs: The dtype of the models' floating outputs. None is fp32 if their inputs are cast.
        num_losses: The number of loss scalers. ``scale_loss(..., loss_id=)`` selects one.
        verbosity: 0 logs nothing, 1 logs the level and its properties to the logger ``autoamp``.
        min_loss_scale: The lowest dynamic scale; None for the limit of fp32.
        max_loss_scale: The highest dynamic scale.
        scope: ``"global"``, or ``"models"``: O1 casts only inside calls of these models, and their floating outputs are
            cast to fp32.
        dtype: The half dtype, or its name, as for `init`. None is torch's default for the device type. If the device
            has no units for that, the level is O0, and the log says so.
        device_type: As for `init`.
        lists: As for `init`.
        trace_overflow: As for `init`.
        on_nonfinite: As for `init`.
        process_group: Ranks that agree on each step of these optimizers, as for `Handle.sync_over`; None for those of
            the parameters' own meshes alone. Where no optimizer is given it is for all that come.

    Returns:
        ``models``, or ``(models, optimizers)`` if optimizers were given: the same objects in the same structure.

    Raises:
        UsageError: An argument is invalid. Nothing was changed; earlier setups are still active.
        ListFileError: A list cannot be used. Nothing was changed.
        LossScaleError: The loss scale is invalid. Nothing was changed.
    """
    model_list, optimizer_list = _checked_models(models), [] if optimizers is None else as_list(optimizers)
    for optimizer in optimizer_list:
        refuse_unguardable(optimizer)
    result = models if optimizers is None else (models, optimizers)
    if not _checked_flag("enabled", enabled):
        end(model_list)
        return result
    level = level_with(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=_checked_flag("patch_torch_functions", patch_torch_functions),
        keep_batchnorm_fp32=_checked_flag("keep_batchnorm_fp32", keep_batchnorm_fp32),
        master_weights=_checked_flag("master_weights", master_weights),
        loss_scale=loss_scale,
    )
    if scope not in ("global", "models"):
        raise UsageError(f"scope={scope!r} is unknown; choose 'global' or 'models'")
    if cast_model_outputs not in (None, torch.float32, torch.float64, *HALF_DTYPES):
        raise UsageError(f"cast_model_outputs={cast_model_outputs!r} is not a floating dtype; choose torch.float32")
    if level.casts_models:
        _refuse_sharded(model_list, opt_level)
    for optimizer in optimizer_list if level.master_weights and level.casts_models else ():
        refuse_inner_groups(optimizer, _to_be_cast(model_list, level), optimizer_list)
    asked = None if process_group is None else RequestedGroup.from_arguments(process_group, None)
    half = level.cast_model_type if level.cast_model_type in HALF_DTYPES else half_dtype(dtype)
    settings = Settings.from_arguments(
        lists, device_type, half, loss_scale=level.loss_scale, on_nonfinite=on_nonfinite, trace_overflow=trace_overflow
    )
    check_device(settings.device_type)
    casts = level.casts_models or level.patch_torch_functions
    if casts and falls_back_to_fp32(half, settings.device_type):
        level = replace(LEVELS["O0"], loss_scale=level.loss_scale)
    settings = replace(_with_tables(settings, level), opt_level=level.name, verbose=verbosity > 1)
    if not is_count(num_losses, 1):
        raise UsageError(f"num_losses={num_losses!r} must be a whole number of 1 or more")
    scaler = make_scaler(level.loss_scale, settings.dtype, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
    setup = Setup(
        settings,
        level,
        on=level.patch_torch_functions and scope == "global",
        outputs=cast_model_outputs,
        # A scaler that was given serves this call alone.
        key=loss_scale if isinstance(loss_scale, LossScaler) else repr(scaler),
        # Copies: an overflow of one loss leaves the scale of the others.
        scalers=[scaler, *(copy.copy(scaler) for _ in range(num_losses - 1))],
    )
    # Every argument was checked: from here on what was set up before for these models is undone.
    runtime = set_up(setup, model_list, optimizer_list)
    if asked is not None:
        runtime.optimizers.sync_over(asked, optimizer_list or None)
    if level.cast_model_type in (None, torch.float32) and keep_batchnorm_fp32 is not None:
        has_no_effect = f"has no effect at opt_level={level.name!r}, which leaves models in fp32"
        warn_user(f"keep_batchnorm_fp32={keep_batchnorm_fp32!r} {has_no_effect}")
    check_half_norms(model_list)
    if verbosity:
        log.info("%s, half dtype %s, %s losses, scope %s", level, settings.dtype, num_losses, scope)
    return result


def _to_be_cast(models: Sequence[Module], level: OptLevel) -> list[Tensor]:
    """Return the fp32 parameters of models, but for those of norms that a level keeps in fp32."""
    kept = MODULES_OF_NORMS if level.keep_batchnorm_fp32 else ()
    modules = [part for model in models for part in model.modules() if not isinstance(part, kept)]
    params = (param for part in modules for param in part.parameters(recurse=False))
    return [param for param in params if param.dtype is torch.float32]


def _with_tables(settings: Settings, level: OptLevel) -> Settings:
    """Return settings with the rules of a level: of functions, and those inside half models."""
    table, modules = settings.table, CastTable((), settings.table.modules)
    half_table = half_model_table(table, settings.device_type) if level.casts_models else None
    settings = replace(settings, table=table if level.patch_torch_functions else modules, half_table=half_table)
    expand(half_table or settings.table)  # refuses unknown names
    return settings


def _checked_models(models: Any) -> list[Module]:
    """Return the models as a list. UsageError: one is wrapped already, or is no module."""
    found = as_list(models)
    for model in found:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            raise UsageError(
                f"a model is wrapped in {type(model).__name__} already; call initialize() first and wrap what "
                "it returns"
            )
        if not isinstance(model, Module):
            raise UsageError(f"models takes a torch.nn.Module or a list of them, not {kind_of(model)}")
    return found


def _refuse_sharded(models: Sequence[Module], opt_level: str) -> None:
    """Raise UsageError for a model that `fully_shard` or `parallelize_module` has distributed, where it is cast."""
    for model in models:
        for name, module in model.named_modules():
            if is_parallelized(module) or any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
                raise UsageError(
                    f"opt_level={opt_level!r} casts the model, and fully_shard or parallelize_module has sharded "
                    f"{name or 'it'!r} already, in the dtype it had; call initialize(model) first, then shard the "
                    "model, then make the optimizer"
                )


def _checked_flag(name: str, value: Any) -> bool | None:
    """Return a switch that is a bool or None. UsageError: it is neither."""
    if value is None or isinstance(value, bool):
        return value
    remedy = f"pass opt_level={value!r} by its name" if name == "enabled" and value in tuple(LEVELS) else ""
    raise UsageError(f"{name}={value!r} is not a bool; {remedy or 'choose True, False or None'}")


def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[Tensor]:
    """Scale a loss for its backward pass, by the handle that `initialize` or `init` set up; see `Handle.scale_loss`.

    Args:
        loss: A floating tensor, as a rule a scalar.
        optimizers: An optimizer, a list of them, or ``[]``.
        loss_id: Which scaler to use, from 0 to ``num_losses - 1``.
        model: Not needed; taken for the sake of legacy calls.
        delay_unscale: Leave the gradients scaled until a later call without it.
        delay_overflow_check: Not needed: gradients are checked when they are unscaled.

    Raises:
        UsageError: Neither `initialize` nor `init` was called.
    """
    return needed_handle("scale_loss").scale_loss(loss, optimizers, loss_id, delay_unscale=delay_unscale)


def state_dict() -> dict[str, Any]:
    """Return the loss scalers' state and the number of skipped steps; ``{}`` after ``initialize(enabled=False)``.

    Raises:
        UsageError: Neither `initialize` nor `init` was called.
    """
    return needed_handle("state_dict").state_dict()


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Load what `state_dict` returned, before or after models and optimizers are loaded; all of it, or nothing.

    Args:
        state: What `state_dict` returned, of a run with as many losses.

    Raises:
        CheckpointError: A key is missing, unknown or of the wrong kind. The message names it.
        UsageError: Neither `initialize` nor `init` was called.
    """
    needed_handle("load_state_dict").load_state_dict(state)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield what the optimizer steps: the fp32 masters of half parameters, and the other parameters themselves.

    The gradients of these are the ones to clip: ``clip_grad_norm_(master_params(optimizer), max_norm)``. Within a
    `scale_loss` block they are multiplied by its loss scale.
    """
    runtime = current_runtime()
    if runtime is not None:
        runtime.optimizers.share_gradients(optimizer)
    for group in optimizer.param_groups:
        yield from group["params"]
