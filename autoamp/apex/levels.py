"""The opt levels O0 to O3: what each means, the handle for one, and models set up for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core import (
    HALF_MODEL,
    Handle,
    LossScaler,
    ModelBoundary,
    Runtime,
    Settings,
    current_handle,
    handles,
    runtime_of,
    set_handle,
)
from autoamp.errors import UsageError, warn_user
from autoamp.tensors import HALF_DTYPES
from autoamp.torch_private import MODULES_OF_NORMS

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


@dataclass
class Setup:
    """What one call of `initialize` asks for.

    Attributes:
        settings: The settings that its arguments came to.
        level: The opt level with the properties that it overrides.
        on: Whether casts act everywhere; False where they act within its models alone, or nowhere.
        outputs: The dtype of the models' floating outputs; None is fp32 if their inputs are cast.
        key: Equal for calls that share their loss scalers.
        scalers: One for each ``loss_id``.
    """

    settings: Settings
    level: OptLevel
    on: bool
    outputs: torch.dtype | None
    key: Any
    scalers: list[LossScaler]


def set_up(setup: Setup, models: Sequence[Module], optimizers: Sequence[Any]) -> Runtime:
    """Set models and optimizers up for a level, and return what drives the handle, which is active then.

    Args:
        setup: What the call of `initialize` asks for.
        models: Its models. What an earlier call set up of them is undone first.
        optimizers: Its optimizers.

    Raises:
        UsageError: Torch is patched for the models of an earlier call, in another way. Nothing was changed.
    """
    handle, level = _handle_for(setup, models, optimizers), setup.level
    runtime = runtime_of(handle)
    try:
        if level.casts_models or (level.cast_model_type is None and not level.master_weights):
            check_half_model(models, level.name, masters=level.master_weights)
        for model in models:
            _set_up_model(runtime, setup, model)
        runtime.optimizers.loss_scalers.use(setup.scalers, optimizers)
        runtime.optimizers.steps.reset()
        # After the models: `state_dict` is patched only if one has its own dtypes by now (`CastModels.active`).
        set_handle(handle)
        for model in () if level.casts_models else models:
            runtime.precisions.override_paths(model)
        for optimizer in optimizers:
            if level.master_weights:
                runtime.optimizers.keep_masters(optimizer, runtime.models.originals)
            else:
                runtime.models.step_halves(optimizer)
                runtime.optimizers.guard(optimizer)
        runtime.models.originals.clear()
        runtime.optimizers.models_with_masters.update(
            model for model, earlier in runtime.setups.items() if earlier.level.master_weights
        )
    except BaseException:
        runtime.deactivate()
        raise
    return runtime


def end(models: Sequence[Module]) -> None:
    """Undo what earlier calls set up. UsageError: models of theirs that are not among these are in use."""
    if _earlier_setups(models):
        raise UsageError(
            "initialize(enabled=False) ends mixed precision in the process, and another model of an earlier call is in "
            "use; leave this call out, or end all earlier calls by autoamp.current_handle().deactivate()"
        )
    set_handle(handles.disabled())


def _earlier_setups(models: Sequence[Module]) -> dict[Module, Setup]:
    """Return what earlier calls set up, by model, but for models that share a module with these."""
    handle = current_handle()
    setups = {} if handle is None else runtime_of(handle).setups
    if not setups:
        return {}
    # A model that nothing but reference cycles keeps alive would count as one in use.
    gc.collect()
    named = {module for model in models for module in model.modules()}
    return {model: setup for model, setup in setups.items() if named.isdisjoint(model.modules())}


def _handle_for(setup: Setup, models: Sequence[Module], optimizers: Sequence[Any]) -> Handle:
    """Return the handle of earlier calls whose models are in use, else a new one; not active yet."""
    earlier = _earlier_setups(models)
    setups = [*earlier.values(), setup]
    # A level that does not patch torch leaves it as an earlier call has it.
    patching = [one.settings for one in setups if one.level.patch_torch_functions]
    if setup.level.patch_torch_functions:
        for name, attribute in (("dtype", "dtype"), ("device_type", "device_type"), ("lists", "table")):
            _refuse_difference(name, getattr(patching[0], attribute), getattr(setup.settings, attribute))
    halves = [one.settings.half_table for one in setups if one.settings.half_table is not None]
    if setup.settings.half_table is not None:
        _refuse_difference("lists", halves[0].rules, setup.settings.half_table.rules)
    settings = replace(
        patching[-1] if patching else setup.settings,
        half_table=halves[-1] if halves else None,
        opt_level=setup.settings.opt_level,
        trace_overflow=any(one.settings.trace_overflow for one in setups),
        on_nonfinite=setup.settings.on_nonfinite,
    )
    on = any(one.on for one in setups)
    handle = current_handle()
    if handle is None or not earlier:
        set_handle(None)
        handle = handles.enabled(settings, on=on, scalers=setup.scalers)
    else:
        runtime_of(handle).grow(settings, models, optimizers, on=on)
    shared = next((one.scalers for one in earlier.values() if one.key == setup.key), None)
    if shared is not None:
        # The scalers that earlier calls share begin anew too, as with Apex: a later training does not go on at the
        # scale of an earlier one whose model is still alive.
        shared[: len(setup.scalers)] = setup.scalers
        setup.scalers = shared
    runtime = runtime_of(handle)
    runtime.optimizers.loss_scalers.forget_but(scaler for one in setups for scaler in one.scalers)
    runtime.setups = weakref.WeakKeyDictionary({**earlier, **dict.fromkeys(models, setup)})
    return handle


def _refuse_difference(name: str, before: Any, now: Any) -> None:
    """Raise UsageError where an argument is not that of an earlier call."""
    if before != now:
        difference = "lists= differs from that" if name == "lists" else f"{name}={now!r} differs from {before!r}"
        raise UsageError(
            f"{difference} of an earlier call of initialize(), whose model is in use; pass the same {name} to both "
            "calls, or end the earlier one by autoamp.current_handle().deactivate()"
        )


def _set_up_model(runtime: Runtime, setup: Setup, model: Module) -> None:
    """Cast a model as the level says, and what goes into it and comes out of it at each call."""
    # None: as the thread casts. True (scope="modules"): the lists act within this model, with casts off around it, and
    # its outputs are fp32. False: nothing is cast within it, even if the level of another patches torch.
    level, outputs = setup.level, setup.outputs
    # A half model has rules of its own.
    kept: Container[Module] = ()
    casts: Any = HALF_MODEL if level.casts_models else None if setup.on else level.patch_torch_functions
    kind: Any = setup.settings.dtype if level.cast_model_type == "half" else level.cast_model_type
    if kind is None:
        dtypes = ModelBoundary(outputs=outputs or (torch.float32 if casts else None), casts=casts)
    else:
        kept, borders = runtime.precisions.fp32_parts(model) if level.casts_models else ((), {})
        runtime.models.cast(model, kind, keep_norms=level.keep_batchnorm_fp32, kept=kept)
        for part, is_fp32 in borders.items():
            inside = (torch.float32, kind, False) if is_fp32 else (kind, torch.float32, HALF_MODEL)
            runtime.models.boundaries.replace(part, ModelBoundary(*inside))
        kind, casts = (torch.float32, False) if model in kept else (kind, casts)
        has_doubles = any(tensor.dtype is torch.float64 for tensor in (*model.parameters(), *model.buffers()))
        dtypes = ModelBoundary(kind, outputs or torch.float32, casts, not has_doubles)
    if dtypes != ModelBoundary():
        for called in _called_parts(model):
            is_kept = called is not model and called in kept
            own = replace(dtypes, inputs=torch.float32, casts=False) if is_kept else dtypes
            runtime.models.boundaries.replace(called, own)


def check_half_norms(models: Iterable[Module]) -> None:
    """Warn of norms with running statistics that are in half precision."""
    for model in models:
        for name, module in model.named_modules():
            buffer = getattr(module, "running_var", None)
            if isinstance(module, MODULES_OF_NORMS) and isinstance(buffer, Tensor) and buffer.dtype in HALF_DTYPES:
                warn_user(
                    f"{type(module).__name__} {name!r} keeps its running statistics in {buffer.dtype}, where the "
                    "running variance overflows or stops moving; pass keep_batchnorm_fp32=True"
                )
                return


def check_half_model(models: Iterable[Module], level: str, *, masters: bool) -> None:
    """Warn of parameters that are in half precision before `initialize` has cast anything.

    Args:
        models: Those that it was given.
        level: The opt level.
        masters: Whether fp32 masters are made of them, which then begin with rounded values.
    """
    then = "makes its fp32 master of the rounded values" if masters else "steps it in half precision"
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.dtype in HALF_DTYPES:
                warn_user(
                    f"parameter {name!r} of {type(model).__name__} is in {parameter.dtype} already: its fp32 values "
                    f"are lost, and opt_level={level!r} {then}. Give initialize() the model in fp32, without .half() "
                    "or .bfloat16()"
                )
                return


def _called_parts(model: Module) -> Iterator[Module]:
    """Yield the modules that a program calls: a model, or the members of a list or dict of modules."""
    yield model
    if isinstance(model, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        for member in model.children():
            yield from _called_parts(member)
