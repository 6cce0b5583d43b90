"""A handle for an opt level, and models set up for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module

from autoamp.errors import UsageError
from autoamp.levels.opt_levels import OptLevel
from autoamp.modules import ForwardDtypes
from autoamp.runtime import Handle, NoOpHandle, Runtime, Settings, Setup, current_runtime, put_handle, runtime_of
from autoamp.stepping import check_half_model
from autoamp.tensors import HALF_DTYPES

__all__ = ["earlier_setups", "leave_off", "runtime_for", "set_up_models", "set_up_optimizers"]


def earlier_setups(models: Sequence[Module]) -> list[Setup]:
    """Return the earlier calls, each with those of its models that are alive and share no module with these."""
    runtime = current_runtime()
    if runtime is None or not runtime.setups:
        return []
    named = {module for model in models for module in model.modules()}

    def left(setup: Setup) -> weakref.WeakSet[Module]:
        return weakref.WeakSet(model for model in setup.models if named.isdisjoint(model.modules()))

    found = [replace(setup, models=left(setup)) for setup in runtime.setups]
    if any(setup.models for setup in found):
        # A model that nothing but reference cycles keeps alive would count as one in use.
        gc.collect()
    return [setup for setup in found if setup.models]


def runtime_for(setup: Setup, earlier: Sequence[Setup], models: Sequence[Module], optimizers: Sequence[Any]) -> Runtime:
    """Return what drives the handle for a call: that of earlier calls, where something is left of them, or a new one.

    It is not active yet.

    Raises:
        UsageError: Torch is patched for the models of an earlier call, in another way. Nothing was changed.
    """
    patched = [one.settings for one in earlier if one.patches]
    if setup.patches:
        for settings in patched:
            _refuse_other_patches(settings, setup.settings)
    # Where this level does not patch torch, an earlier one that does decides how it is patched.
    settings = replace(
        setup.settings if setup.patches or not patched else patched[-1],
        opt_level=setup.settings.opt_level,
        trace_overflow=any(one.settings.trace_overflow for one in (*earlier, setup)),
        on_nonfinite=setup.settings.on_nonfinite,
    )
    on = any(one.on for one in (*earlier, setup))
    runtime = current_runtime()
    if runtime is None or not earlier:
        put_handle(None)
        runtime = runtime_of(Handle(settings, on=on, scalers=setup.scalers))
    else:
        runtime.grow(settings, earlier, models, optimizers, on=on)
    shared = next((one.scalers for one in earlier if one.key == setup.key), None)
    if shared is not None:
        # The scalers that earlier calls share begin anew too, as with Apex: a later training does not go on at the
        # scale of an earlier one whose model is still alive.
        shared[: len(setup.scalers)] = setup.scalers
        setup = replace(setup, scalers=shared)
        runtime.optimizers.loss_scalers.forget_but(scaler for one in earlier for scaler in one.scalers)
    runtime.setups.append(setup)
    return runtime


def _refuse_other_patches(earlier: Settings, now: Settings) -> None:
    for name, before, wanted in (
        ("dtype", earlier.dtype, now.dtype),
        ("device_type", earlier.device_type, now.device_type),
        ("lists", earlier.table, now.table),
    ):
        if before != wanted:
            difference = f"{name}={wanted!r} differs from {before!r}" if name != "lists" else "lists= differs from that"
            raise UsageError(
                f"{difference} of an earlier call of initialize(), whose model is in use; pass the same {name} to both "
                "calls, or end the earlier one by initialize(model, optimizer, enabled=False)"
            )


def leave_off(models: Sequence[Module], optimizers: Sequence[Any]) -> None:
    """Undo what was set up for these models and optimizers, and scale their losses no more."""
    earlier = earlier_setups(models)
    runtime = current_runtime()
    if runtime is None or not earlier:
        put_handle(NoOpHandle())
        return
    runtime.let_go(models, optimizers)
    runtime.setups[:] = earlier
    runtime.optimizers.masters_for = runtime.wants_masters if runtime.keeps_masters else None
    runtime.optimizers.loss_scalers.switch_off(optimizers)
    for model in models:
        runtime.models.set_forward_dtypes(model, ForwardDtypes(casts=False))
    runtime.patched.patch_anew()


def set_up_models(
    runtime: Runtime, setup: Setup, level: OptLevel, models: Sequence[Module], outputs: torch.dtype | None
) -> None:
    """Cast the models as the level says, and what goes into them and comes out of them at each call."""
    half = setup.settings.dtype
    # None: as everywhere. Within a model whose level does not patch torch nothing is cast, though it be patched for
    # another.
    casts = None if setup.on else setup.patches
    forward = ForwardDtypes(outputs=outputs or (torch.float32 if casts else None), casts=casts)
    kind: Any = half if level.cast_model_type == "half" else level.cast_model_type
    if kind in HALF_DTYPES:
        check_half_model(models, level.name, masters=level.master_weights)
    for model in models:
        if kind is not None:
            inward = ForwardDtypes(kind, outputs or torch.float32, casts, doubles=not _has_doubles(model))
            runtime.models.cast(model, kind, keep_norms=level.keep_batchnorm_fp32)
            runtime.models.set_forward_dtypes(model, inward)
        elif forward != ForwardDtypes():
            runtime.models.set_forward_dtypes(model, forward)


def set_up_optimizers(runtime: Runtime, level: OptLevel, optimizers: Sequence[Any]) -> None:
    """Let the optimizers step masters or half parameters, as the level says."""
    for optimizer in optimizers:
        if level.master_weights:
            runtime.optimizers.keep_masters(optimizer, runtime.models.originals)
        else:
            runtime.models.step_halves(optimizer)
            runtime.optimizers.guard(optimizer, check=False)
    runtime.models.originals.clear()
    # Of those that come later.
    runtime.optimizers.masters_for = runtime.wants_masters if runtime.keeps_masters else None


def _has_doubles(model: Module) -> bool:
    return any(tensor.dtype is torch.float64 for tensor in (*model.parameters(), *model.buffers()))
