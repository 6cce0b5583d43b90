"""`DistributedState`: what `torch.distributed.checkpoint` saves and loads of a training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn import Module

from autoamp.checkpoints.optimizer_state import load_optimizers, optimizers_state
from autoamp.errors import UsageError, kind_of, warn_user
from autoamp.runtime import current_handle, runtime_of
from autoamp.stepping import is_optimizer


class DistributedState:
    """Model, optimizers, masters and loss scales, for `torch.distributed.checkpoint` to save and load.

    It is what torch calls stateful, so that torch's own functions do the rest, on all ranks together:

        state = autoamp.DistributedState(model, optimizer)
        dcp.save({"training": state}, checkpoint_id=folder)
        dcp.async_save({"training": state}, checkpoint_id=folder, process_group=own_group)
        dcp.load({"training": state}, checkpoint_id=folder)

    A checkpoint may be loaded on another number of ranks and under another wrapper: parameters go by the names that
    they have without one. At O2 the model's entries are the fp32 masters. `load` goes for a fresh optimizer too, which
    has no state yet. Tensors are loaded in place, as torch does it, so a load that fails leaves some of them loaded.

    Args:
        model: The module, wrapped in DistributedDataParallel, sharded by ``fully_shard``, or neither.
        optimizers: An optimizer, or several of them, that step parameters of this model alone.
        amp: Whether the loss scales and the number of skips are part of it. False for a checkpoint that has none.

    Raises:
        UsageError: This is no module, or no optimizer.
    """

    def __init__(self, model: Module, optimizers: Any = (), *, amp: bool = True) -> None:
        if not isinstance(model, Module):
            raise UsageError(f"model={type(model).__name__} is not a torch.nn.Module; pass the model, wrapped or not")
        listed = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
        for optimizer in listed:
            if not is_optimizer(optimizer):
                raise UsageError(
                    f"optimizers takes an optimizer or a list of them, not {kind_of(optimizer)}: it needs "
                    "`param_groups` and `step()`"
                )
        self._model = model
        self._optimizers = listed
        self._amp = amp
        self._marks: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"model": ..., "optimizer": ..., "amp": ...}``, flat dicts by name. Called by torch on all ranks.

        Tensors are those of the training, not copies: parameters of the model's shapes, fp32 at O2; what
        `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` gives with
        ``flatten_optimizer_state_dict=True``, and the names of parameters that have state.

        Raises:
            UsageError: An optimizer steps a parameter that is not the model's.
        """
        # Imported here: it takes a while, and most programs have no use for it.
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state: dict[str, Any] = {"model": get_model_state_dict(self._model)}
        if self._optimizers:
            state["optimizer"] = optimizers_state(self._model, self._optimizers)
        self._marks = self._scales()
        if self._marks:
            state["amp"] = {
                key: dict(value) if isinstance(value, dict) else value for key, value in self._marks.items()
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `torch.distributed.checkpoint.load` has read.

        A checkpoint without loss scales is warned of: with ``amp=False``, and where the load was allowed to be partial.

        Raises:
            CheckpointError: The state of an optimizer or a scaler is missing or torn.
            UsageError: An optimizer steps a parameter that is not the model's.
        """
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(self._model, dict(state["model"]))
        if self._optimizers:
            load_optimizers(self._model, self._optimizers, state["optimizer"])
        handle = current_handle()
        scales = state.get("amp", {})
        if handle is None:
            return
        ours = handle.state_dict()
        if scales and not _unread(scales, self._marks):
            handle.load_state_dict(scales)
        elif runtime_of(handle).optimizers.loss_scalers.has_dynamic:
            warn_user(
                "this checkpoint has no state of the loss scalers: the loss scale continues at "
                f"{ours['loss_scaler0']['loss_scale']:g}, and the first steps may be skipped. Save "
                "autoamp.DistributedState, or autoamp.state_dict() beside the model, and load that too"
            )

    def _scales(self) -> dict[str, Any]:
        handle = current_handle()
        return handle.state_dict() if self._amp and handle is not None else {}


def _unread(read: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether the loss scales are the very floats that were there before, and not those of a checkpoint."""
    scalers = [key for key in given if isinstance(given[key], Mapping)]
    return bool(scalers) and all(
        key in read and read[key].get("loss_scale") is given[key]["loss_scale"] for key in scalers
    )
