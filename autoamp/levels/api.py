"""Opt levels: `initialize()` turns "O0" to "O3" into patches, cast models, master weights and loss scalers."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autoamp.errors import UsageError, warn_user
from autoamp.modules import ForwardDtypes
from autoamp.ops import expand
from autoamp.rules import CastTable
from autoamp.runtime import Handle, NoOpHandle, Settings, Setup, current_handle, needed_handle, put_handle
from autoamp.scaling import LossScaler, is_count, make_scaler
from autoamp.stepping import check_half_model, check_half_norms, check_optimizer, is_optimizer, refuse_own_scaler
from autoamp.tensors import HALF_DTYPES

__all__ = [
    "LEVELS",
    "OptLevel",
    "check_level",
    "initialize",
    "load_state_dict",
    "master_params",
    "scale_loss",
    "state_dict",
]

log = logging.getLogger(__name__)


# -- opt levels --


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


LEVELS = {
    "O0": OptLevel("O0", torch.float32, False, False, False, 1.0),
    "O1": OptLevel("O1", None, True, False, False, None),
    "O2": OptLevel("O2", "half", False, True, True, None),
    "O3": OptLevel("O3", "half", False, False, False, 1.0),
}


def check_level(opt_level: Any) -> None:
    """Raise UsageError for what is no level."""
    if opt_level not in tuple(LEVELS):
        raise UsageError(f"opt_level={opt_level!r} is unknown; choose 'O0', 'O1', 'O2' or 'O3'")


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


def scalers_for(
    level: OptLevel, dtype: torch.dtype, num_losses: int, lowest: float | None, highest: float
) -> list[LossScaler]:
    """Return a scaler for each of so many losses."""
    if not is_count(num_losses, 1):
        raise UsageError(f"num_losses={num_losses!r} is no number of losses; choose 1 or more")
    first = make_scaler(level.loss_scale, dtype, min_loss_scale=lowest, max_loss_scale=highest)
    # No loss may move the scale of another.
    return [first, *(copy.copy(first) for _ in range(num_losses - 1))]


def kind_of_scale(level: OptLevel, scaler: LossScaler) -> Any:
    """Return what is equal for calls that want the same scale: a scaler that was given is like no other."""
    given = isinstance(level.loss_scale, LossScaler)
    return level.loss_scale if given else (type(scaler), scaler.loss_scale)


# -- checks of arguments --


def checked_models(models: Any) -> list[Module]:
    """Return the models as a list. UsageError: one is wrapped already, or is none."""
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


def checked_optimizers(optimizers: Any) -> list[Any]:
    """Return the optimizers as a list. UsageError: one is none, or scales its losses itself."""
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
    """Return a switch that is a bool or None."""
    if value is None or isinstance(value, bool):
        return value
    remedy = f"pass opt_level={value!r} by its name" if name == "enabled" and value in tuple(LEVELS) else ""
    raise UsageError(f"{name}={value!r} is no bool; {remedy or 'choose True, False or None'}")


def checked_scale(value: Any) -> Any:
    """Return a loss scale whose string, if it is one, means something."""
    if isinstance(value, str) and value != "dynamic":
        raise UsageError(f"loss_scale={value!r} is a string; choose 'dynamic' or a number, such as 128.0")
    return value


def warn_of_settings(
    level: OptLevel, models: Sequence[Module], optimizers: Sequence[Any], keep_norms: Any, table: CastTable
) -> None:
    """Warn of arguments that say nothing at this level, and of models and optimizers that it does not suit."""
    if level.cast_model_type is None and not level.master_weights:
        check_half_model(models, level.name)
    if level.cast_model_type in (None, torch.float32) and keep_norms is not None:
        warn_user(
            f"keep_batchnorm_fp32={keep_norms!r} says nothing at opt_level={level.name!r}, which leaves models in "
            "fp32; it is ignored"
        )
    if table.modules and level.cast_model_type in ("half", *HALF_DTYPES):
        warn_user(
            f"{table.modules[0].origin}: [modules] says nothing at opt_level={level.name!r}, which casts whole models; "
            "use opt_level='O1' for precision by module"
        )
    check_half_norms(models)
    for optimizer in optimizers:
        check_optimizer(optimizer)


# -- setup: what a call does to handles and models --


def earlier_setups(models: Sequence[Module]) -> list[Setup]:
    """Return the earlier calls whose models are alive and not named again, nor a part of one that is, or around it."""
    handle = current_handle()
    if handle is None or not handle.setups:
        return []
    named = {module for model in models for module in model.modules()}

    def left(setup: Setup) -> weakref.WeakSet[Module]:
        return weakref.WeakSet(model for model in setup.models if named.isdisjoint(model.modules()))

    found = [replace(setup, models=left(setup)) for setup in handle.setups]
    if any(setup.models for setup in found):
        # What is alive in cycles alone would keep its patches.
        gc.collect()
    return [setup for setup in found if setup.models]


def handle_for(setup: Setup, earlier: Sequence[Setup], models: Sequence[Module], optimizers: Sequence[Any]) -> Handle:
    """Return a new handle, not active yet, that has taken over what earlier calls set up for other models."""
    patched = [one for one in earlier if one.patches]
    if setup.patches and any(one.settings.table != setup.settings.table for one in patched):
        log.warning(
            "torch can be patched in one way at a time: the models of earlier calls of initialize() run by the lists "
            "and the half dtype %s of this one from now on",
            setup.settings.dtype,
        )
    # A level that leaves torch alone leaves it to the last one that does not.
    ruling = setup.settings if setup.patches or not patched else patched[-1].settings
    on = setup.on or any(one.on for one in earlier)
    handle = Handle(replace(ruling, opt_level=setup.settings.opt_level), on=on, scalers=setup.scalers)
    put_handle(None, functools.partial(handle.inherit, setups=earlier, models=models, optimizers=optimizers))
    shared = next((one.scalers for one in earlier if one.key == setup.key), None)
    if shared is not None:
        # All begin anew, as with Apex: a later training finds nothing of an earlier one whose model lives on.
        shared[: len(setup.scalers)] = setup.scalers
        setup = replace(setup, scalers=shared)
        handle.optimizers.forget_scalers_but(scaler for one in earlier for scaler in one.scalers)
    handle.setups.append(setup)
    return handle


def leave_off(models: Sequence[Module], optimizers: Sequence[Any]) -> None:
    """Undo what was set up for these models and optimizers, and leave their losses alone."""
    earlier = earlier_setups(models)
    handle = current_handle()
    if handle is None or not earlier:
        put_handle(NoOpHandle())
        return
    handle.let_go(models, optimizers)
    handle.setups[:] = earlier
    handle.optimizers.masters_for_all = any(setup.masters for setup in earlier)
    handle.optimizers.switch_off(optimizers)
    for model in models:
        handle.set_up_model(model, ForwardDtypes(casts=False))
    handle.install_anew()


def set_up_models(
    handle: Handle, setup: Setup, level: OptLevel, models: Sequence[Module], outputs: torch.dtype | None
) -> None:
    """Cast the models as the level says, and what goes into them and comes out of them at each call."""
    half = setup.settings.dtype
    # In a model whose level leaves torch alone nothing is cast, also where torch is patched for another.
    casts = None if setup.on else setup.patches
    forward = ForwardDtypes(outputs=outputs or (torch.float32 if casts else None), casts=casts)
    kind: Any = half if level.cast_model_type == "half" else level.cast_model_type
    for model in models:
        if kind is not None:
            inward = ForwardDtypes(kind, outputs or torch.float32, casts, doubles=not _has_doubles(model))
            handle.set_up_model(model, inward, dtype=kind, keep_norms=level.keep_batchnorm_fp32)
        elif forward != ForwardDtypes():
            handle.set_up_model(model, forward)


def _has_doubles(model: Module) -> bool:
    return any(tensor.dtype is torch.float64 for tensor in (*model.parameters(), *model.buffers()))


# -- the public functions --


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool | None = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | Literal[False] | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | None = None,
    master_weights: bool | None = None,
    loss_scale: Any = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    scope: str = "global",
    dtype: torch.dtype | None = None,
    device_type: str | None = None,
    lists: Any = None,
) -> Any:
    """Set models and optimizers up for mixed precision at an opt level.

    A call replaces what was set up before for the models and optimizers that it names: they are as they were, and set
    up anew. Models and optimizers of earlier calls that it does not name stay as they are, in working order.

    Args:
        models: A module or a list of modules, in fp32, not yet wrapped in DataParallel or DistributedDataParallel.
        optimizers: An optimizer, a list of them, or None for inference.
        enabled: False returns the arguments as they are; ``scale_loss`` yields the loss as it is.
        opt_level: ``"O0"``: fp32. ``"O1"``: torch is patched by the cast lists. ``"O2"``: models in half precision,
            norms and master weights in fp32. ``"O3"``: models in half precision.
        cast_model_type: Overrides the level's, as does False, which leaves models, their inputs and outputs alone.
        patch_torch_functions: Overrides the level's.
        keep_batchnorm_fp32: Overrides the level's; it says nothing where the model is not cast.
        master_weights: Overrides the level's.
        loss_scale: Overrides the level's: a number or ``"dynamic"``.
        cast_model_outputs: What floating outputs of the models are cast to. None is fp32 where inputs are cast.
        num_losses: How many scalers there are, chosen by ``scale_loss(..., loss_id=)``.
        verbosity: 0 logs nothing, 1 logs the level and its properties to the logger ``autoamp``.
        min_loss_scale: The lowest dynamic scale; None for no other bound than fp32's.
        max_loss_scale: The highest dynamic scale.
        scope: ``"global"``, or ``"models"``: casts of O1 act within the calls of these models alone, and their floating
            outputs are cast to fp32.
        dtype: The half dtype; None is torch's own choice for the device type.
        device_type: As for `init`.
        lists: As for `init`.

    Returns:
        ``models``, or ``(models, optimizers)`` if optimizers were given, as they were given: the same objects.

    Raises:
        UsageError: An argument is wrong. Nothing was changed, and what was set up before is still active.
        ListFileError: So is a list.
        ValueError: So is the loss scale.
    """
    model_list, optimizer_list = checked_models(models), checked_optimizers(optimizers)
    result = models if optimizers is None else (models, optimizers)
    if not checked_flag("enabled", enabled):
        leave_off(model_list, optimizer_list)
        return result
    level = level_with(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=checked_flag("patch_torch_functions", patch_torch_functions),
        keep_batchnorm_fp32=checked_flag("keep_batchnorm_fp32", keep_batchnorm_fp32),
        master_weights=checked_flag("master_weights", master_weights),
        loss_scale=checked_scale(loss_scale),
    )
    if scope not in ("global", "models"):
        raise UsageError(f"scope={scope!r} is unknown; choose 'global' or 'models'")
    if cast_model_outputs not in (None, torch.float32, torch.float64, *HALF_DTYPES):
        raise UsageError(f"cast_model_outputs={cast_model_outputs!r} is no floating dtype; choose torch.float32")
    half = level.cast_model_type if level.cast_model_type in HALF_DTYPES else dtype
    settings = Settings.of(level.loss_scale, True, verbosity > 1, True, lists, device_type, half, True)
    table = settings.table if level.patch_torch_functions else CastTable(modules=settings.table.modules)
    expand(table)
    settings = replace(settings, table=table, opt_level=opt_level)
    scalers = scalers_for(level, settings.dtype, num_losses, min_loss_scale, max_loss_scale)
    earlier = earlier_setups(model_list)
    setup = Setup(
        settings,
        patches=level.patch_torch_functions,
        on=level.patch_torch_functions and scope == "global",
        masters=level.master_weights,
        key=(kind_of_scale(level, scalers[0]), min_loss_scale, max_loss_scale),
        scalers=scalers,
        models=weakref.WeakSet(model_list),
    )
    # Every argument was looked at: from here on what was set up before for these models is gone.
    handle = handle_for(setup, earlier, model_list, optimizer_list)
    setup = handle.setups[-1]
    try:
        set_up_models(handle, setup, level, model_list, cast_model_outputs)
        handle.optimizers.use_scalers(setup.scalers, optimizer_list)
        put_handle(handle)
        for model in model_list:
            handle.override(model)
        for optimizer in optimizer_list:
            keep = handle.keep_masters if level.master_weights else handle.step_halves
            keep(optimizer)
    except BaseException:
        handle.deactivate()
        raise
    handle.models.originals.clear()
    if any(one.masters for one in handle.setups):
        handle.optimizers.keep_masters_for_all(handle.steps_halves)
    warn_of_settings(level, model_list, optimizer_list, keep_batchnorm_fp32, table)
    if verbosity:
        log.info("%s, half dtype %s, %s losses, scope %s", level, settings.dtype, num_losses, scope)
    return result


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

    Raises:
        CheckpointError: A key is missing, unknown or of the wrong kind. The message names it.
        UsageError: Neither `initialize` nor `init` was called.
    """
    needed_handle("load_state_dict").load_state_dict(state)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield what the optimizer steps: the fp32 masters of half parameters, and the other parameters themselves.

    The gradients of these are the ones to clip: ``clip_grad_norm_(master_params(optimizer), max_norm)``. Inside of a
    `scale_loss` block they have the scale of the block.
    """
    handle = current_handle()
    if handle is not None:
        handle.optimizers.collect(optimizer)
    for group in optimizer.param_groups:
        yield from group["params"]
