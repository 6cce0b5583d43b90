"""`DistributedState`: what `torch.distributed.checkpoint` saves and loads of a training.

An optimizer's state goes by the names of the model's parameters, whichever rank steps them and whatever shards they
are. The keys are those of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` with
``flatten_optimizer_state_dict``: ``state.<parameter>.<entry>`` and ``param_groups.<parameter>.<option>``. In place of a
half parameter that has a master the master's state is meant, which is fp32.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core.api import current_handle, disable_casts
from autoamp.core.attach import is_optimizer, master_of, trust_masters
from autoamp.core.handle import runtime_of
from autoamp.errors import CheckpointError, UsageError, kind_of, warn_user

# The name under which each of these wrappers has what it wraps, by the name of its class: some are imported by nobody
# who does not use them.
_WRAPPED = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}

# Names the parameters that had state when a checkpoint was made.
_STEPPED = "stepped"


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
                raise UsageError(f"Expected an optimizer, got {kind_of(optimizer)}. Pass those that step this model")
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
        handle = current_handle()
        self._marks = handle.state_dict() if self._amp and handle is not None else {}
        if self._marks:
            # Its floats are the same objects: see `_unread`.
            state["amp"] = copy.deepcopy(self._marks)
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
        trust_masters(self._model.parameters())
        if self._optimizers:
            load_optimizers(self._model, self._optimizers, state["optimizer"])
        handle = current_handle()
        scales = state.get("amp", {})
        if handle is None:
            return
        if scales and not _unread(scales, self._marks):
            handle.load_state_dict(scales)
        elif runtime_of(handle).optimizers.loss_scalers.has_dynamic:
            warn_user(
                "this checkpoint has no state of the loss scalers: the loss scale continues at "
                f"{handle.state_dict()['loss_scaler0']['loss_scale']:g}, and the first steps may be skipped. Save "
                "autoamp.DistributedState, or autoamp.state_dict() beside the model, and load that too"
            )


def _unread(read: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether the loss scales are the very floats that were there before, and not those of a checkpoint."""
    scalers = [key for key in given if isinstance(given[key], Mapping)]
    return bool(scalers) and all(
        key in read and read[key].get("loss_scale") is given[key]["loss_scale"] for key in scalers
    )


# -- optimizers --


def named_parameters(model: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter once, under the name that it has without wrappers such as DistributedDataParallel."""
    for name, parameter in model.named_parameters():
        module: Any = model
        kept = []
        for part in name.split("."):
            if part not in (_WRAPPED.get(kind.__name__) for kind in type(module).__mro__):
                kept.append(part)
            module = getattr(module, part)
        yield ".".join(kept), parameter


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A parameter that an optimizer steps.

    Attributes:
        name: That of the model's parameter.
        stepped: What is in the optimizer's group: the parameter, or its master.
        group: The group.
    """

    name: str
    stepped: Tensor
    group: dict[str, Any]


def _entries(model: Module, optimizer: Any) -> list[_Entry]:
    """Return an entry for each parameter that an optimizer steps, in the order of its groups.

    Raises:
        UsageError: One of them is not the model's.
    """
    names: dict[int, str] = {}
    for name, parameter in named_parameters(model):
        names |= {id(one): name for one in (parameter, master_of(parameter)) if one is not None}
    found: list[_Entry] = []
    for number, group in enumerate(optimizer.param_groups):
        for place, stepped in enumerate(group["params"]):
            if id(stepped) not in names:
                raise UsageError(
                    f"parameter {place} of group {number} of {type(optimizer).__name__}, of shape "
                    f"{tuple(stepped.shape)}, is not a parameter of the model; pass the model whose parameters the "
                    "optimizer steps, and make the optimizer after fully_shard() or parallelize_module()"
                )
            found.append(_Entry(names[id(stepped)], stepped, group))
    return found


def optimizers_state(model: Module, optimizers: Iterable[Any]) -> dict[str, Any]:
    """Return the state of optimizers as one flat dict, whose tensors are those of the optimizers, not copies.

    Where a parameter has no state yet there are zeros of the shapes that a first step would make, for a checkpoint to
    be loaded into. The optimizers stay as they are. The entry ``stepped`` names the parameters that do have state.

    Raises:
        UsageError: An optimizer steps a parameter that is not the model's.
    """
    state: dict[str, Any] = {}
    stepped: list[str] = []
    for optimizer in optimizers:
        for entry in _entries(model, optimizer):
            own, options = optimizer.state.get(entry.stepped), entry.group
            if own:
                stepped.append(entry.name)
            else:
                own, options = _after_first_step(optimizer, entry)
            state.update({f"state.{entry.name}.{key}": value for key, value in own.items()})
            # Those of the group win. A first step may add the number of steps, say.
            options = {**options, **entry.group}
            state.update({f"param_groups.{entry.name}.{key}": options[key] for key in options if key != "params"})
    # A string: it is one entry of a checkpoint, however long the list is.
    state[_STEPPED] = "\n".join(stepped)
    return state


def load_optimizers(model: Module, optimizers: Iterable[Any], state: Mapping[str, Any]) -> None:
    """Give optimizers what `optimizers_state` returned, here or on other ranks.

    Raises:
        CheckpointError: The state of a parameter is missing. Nothing was loaded.
        UsageError: An optimizer steps a parameter that is not the model's.
    """
    had_state = set(state[_STEPPED].split("\n")) if _STEPPED in state else None
    prepared = [(optimizer, _loadable(model, optimizer, state, had_state)) for optimizer in optimizers]
    for optimizer, loadable in prepared:
        optimizer.load_state_dict(loadable)


def _loadable(model: Module, optimizer: Any, state: Mapping[str, Any], had_state: set[str] | None) -> dict[str, Any]:
    """Return what ``optimizer.load_state_dict`` takes."""
    of_parameters: dict[int, dict[str, Any]] = {}
    entries = _entries(model, optimizer)
    by_name, options = ({entry.name: dict[str, Any]() for entry in entries} for _ in range(2))
    for key, value in state.items():
        kind, _, path = key.partition(".")
        # Names of parameters have dots, those of entries have none.
        name, _, last = path.rpartition(".")
        parts = {"state": by_name, "param_groups": options}.get(kind, {})
        if name in parts:
            parts[name][last] = value
    for place, entry in enumerate(entries):
        own = by_name[entry.name]
        if had_state is not None and entry.name in had_state and not own:
            raise CheckpointError(
                f"the state of {type(optimizer).__name__} for parameter {entry.name!r} is missing; load it with an "
                "optimizer of the class that it was saved from; nothing was loaded"
            )
        if own and (had_state is None or entry.name in had_state):
            of_parameters[place] = own
        elif had_state is not None:
            # What a first step would have added.
            options[entry.name] = {key: options[entry.name][key] for key in options[entry.name] if key in entry.group}
    groups, index = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        loaded = options[entries[index].name] if count else {}
        kept = {option: value for option, value in group.items() if option != "params"}
        groups.append({**kept, **loaded, "params": list(range(index, index + count))})
        index += count
    return {"state": of_parameters, "param_groups": groups}


@torch.no_grad()
def _after_first_step(optimizer: Any, entry: _Entry) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state and the group that a first step would leave, by stepping a stand-in.

    Neither the optimizer nor the parameter is touched. Both are empty where a step takes a closure.
    """
    if not entry.stepped.requires_grad:
        return {}, {}
    stand_in = torch.zeros_like(entry.stepped).requires_grad_()
    stand_in.grad = torch.zeros_like(stand_in, requires_grad=False)
    # Not a copy: that of an optimizer goes by its own rules. This one has no hooks and no state.
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    shadow.state = defaultdict(dict)
    options = {key: copy.deepcopy(value) for key, value in entry.group.items() if key != "params"}
    shadow.param_groups = [{**options, "params": [stand_in]}]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if hasattr(shadow, hooks):
            setattr(shadow, hooks, OrderedDict())
    # The step of a stand-in is none of the training: nobody counts it, or looks at its gradients.
    handle = current_handle()
    running = {} if handle is None else runtime_of(handle).optimizers.running
    running[id(shadow)] = threading.get_ident(), shadow
    try:
        with disable_casts():
            # Of the class: a guard or a learning rate's schedule may stand at the object's.
            type(optimizer).step(shadow)
    except TypeError:
        return {}, {}
    finally:
        running.pop(id(shadow), None)
    return dict(shadow.state.get(stand_in, {})), shadow.param_groups[0]
