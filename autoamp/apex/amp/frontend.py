"""The functions of `apex.amp`: its signatures, and every form of argument that its callers pass."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from autoamp.apex import initialize as levels
from autoamp.apex.alias import Options, options
from autoamp.apex.amp._amp_state import _amp_state
from autoamp.apex.amp._process_optimizer import AmpOptimizerState
from autoamp.apex.amp.copies import check as check_copies
from autoamp.apex.amp.lists import changed_lists
from autoamp.apex.amp.properties import O0, O1, O2, O3, Properties, as_flag, as_number, as_scale, as_type, opt_levels
from autoamp.apex.parallel import DistributedDataParallel
from autoamp.errors import CheckpointError, UsageError, warn_user


class _Unnamed(str):
    """The type of the default of ``opt_level``: a library that passes it on names no level either."""


_UNNAMED = _Unnamed("O1")


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: Any = True,
    opt_level: Any = _UNNAMED,
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: Any = 1,
    verbosity: Any = 1,
    min_loss_scale: Any = None,
    max_loss_scale: Any = 2.0**24,
    **of_copies: Any,
) -> Any:
    """Set models and optimizers up, as ``apex.amp.initialize`` did; see `autoamp.initialize` for all arguments.

    The half dtype, the device type and the lists are those that `install_as_apex` was given, and so are the level and
    the loss scale where the call names none. Flags and numbers may be strings, as command lines give them. A level in
    the place of ``enabled`` means True.

    Returns:
        As `autoamp.initialize`.

    Raises:
        UsageError: A model is wrapped in `DistributedDataParallel` already, or an argument of a copy of Apex would
            change something, such as ``combine_ddp``; others of them are logged. Beside it what `autoamp.initialize`
            raises.
    """
    check_copies(of_copies)
    for model in models if isinstance(models, (list, tuple)) else [models]:
        if isinstance(model, DistributedDataParallel):
            raise UsageError(
                "a model is wrapped in apex.parallel.DistributedDataParallel already; call initialize() first and wrap "
                "what it returns"
            )
    chosen = options()
    level: Any = chosen.opt_level if opt_level is None or isinstance(opt_level, _Unnamed) else opt_level
    on = _enabled(enabled, level)
    scale: Any = chosen.loss_scale if loss_scale is None else as_scale(loss_scale)
    losses, loudness = as_number("num_losses", num_losses), int(as_number("verbosity", verbosity) or 0)
    lowest, highest = as_number("min_loss_scale", min_loss_scale), as_number("max_loss_scale", max_loss_scale)
    with warnings.catch_warnings():
        if _amp_state.allow_incoming_model_not_fp32:
            warnings.filterwarnings("ignore", message=".*its fp32 values are lost")
        result = levels.initialize(
            models, optimizers, on, level, as_type(cast_model_type),
            as_flag("patch_torch_functions", patch_torch_functions),
            as_flag("keep_batchnorm_fp32", keep_batchnorm_fp32), as_flag("master_weights", master_weights),
            scale, cast_model_outputs, losses, loudness, lowest, highest, **of_alias(chosen),
        )  # fmt: skip
    _amp_state.verbosity, _amp_state.min_loss_scale, _amp_state.max_loss_scale = loudness, lowest, highest
    if on:
        _amp_state.num_losses = losses
        for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            if optimizer is not None:
                AmpOptimizerState(optimizer).attach(optimizer)
    return result


def of_alias(chosen: Options) -> dict[str, Any]:
    """Return what `autoamp.init` and `autoamp.initialize` take from `install_as_apex`, with the program's own lists."""
    names = ("dtype", "device_type", "trace_overflow", "on_nonfinite")
    return {"lists": [*chosen.lists, *changed_lists()], **{name: getattr(chosen, name) for name in names}}


def _enabled(enabled: Any, level: str) -> bool:
    """Whether amp is wanted. Published programs pass a level in this place, where Apex took it for True."""
    if isinstance(enabled, str) and enabled in opt_levels:
        if enabled != level:
            warn_user(
                f"initialize() got enabled={enabled!r}: the third argument is `enabled`, and the level is {level!r}; "
                f"pass opt_level={enabled!r} by its name"
            )
        return True
    return bool(as_flag("enabled", enabled))


def state_dict(destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
    """Return the state of the loss scalers alone, as Apex did: ``{"loss_scaler0": {"loss_scale": float, ...}, ...}``.

    Args:
        destination: The mapping that the entries are written to; a new dict unless given.
    """
    found: MutableMapping[str, Any] = OrderedDict() if destination is None else destination
    found.update({name: entry for name, entry in levels.state_dict().items() if name.startswith("loss_scaler")})
    return found


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load what `state_dict` returned. From a run with another number of losses, the scalers that both have are loaded.

    Raises:
        CheckpointError: A key is unknown or of the wrong kind. The message names it, and nothing was loaded.
    """
    here = levels.state_dict()
    if not here or not isinstance(state_dict, Mapping):
        levels.load_state_dict(state_dict)
        return
    scalers = {name for name in state_dict if str(name).startswith("loss_scaler")}
    ours = {name for name in here if name.startswith("loss_scaler")}
    if scalers != ours:
        if not scalers:
            raise CheckpointError("key 'loss_scaler0' is missing; pass the result of amp.state_dict()")
        warn_user(
            f"the state has {len(scalers)} loss scalers and this run {len(ours)}; those that both have are loaded"
        )
    dropped = scalers - ours
    levels.load_state_dict({**here, **{name: value for name, value in state_dict.items() if name not in dropped}})
