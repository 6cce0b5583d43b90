"""Which parameters torch's DistributedDataParallel keeps equal over processes, and what it will do to their gradients.

Masters have to know of it: they must be equal where the half parameters are, and the gradients that its reducer finds
must be of the parameter's dtype. It calls nobody when it is made, so the registration of its module is watched for.
"""

from __future__ import annotations

import enum
import gc
import weakref
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from autoamp.program import listen

_AVAILABLE = dist.is_available()


def several_processes() -> bool:
    """Whether there is a process group of more than one process."""
    # As torch's own functions find out, which take three times as many calls.
    world: Any = dist.group.WORLD if _AVAILABLE else None
    return world is not None and world.size() > 1


class Sync(enum.Enum):
    """Whether the backward pass that follows the last forward pass reduces gradients."""

    YES = enum.auto()
    NO = enum.auto()
    UNSURE = enum.auto()


def kept_equal(wrapper: DistributedDataParallel) -> list[Tensor]:
    """Return the parameters that a DistributedDataParallel keeps equal."""
    ignored = wrapper.parameters_to_ignore
    return [param for name, param in wrapper.module.named_parameters() if name not in ignored]


def next_sync(wrapper: DistributedDataParallel | None) -> Sync:
    """Tell what the backward pass at hand does; to be asked between the forward pass and it.

    The forward pass decides, and leaves ``require_forward_param_sync``; but so does one without gradients.
    """
    if wrapper is None:
        return Sync.NO
    prepared, wanted = wrapper.require_forward_param_sync, wrapper.require_backward_grad_sync
    return Sync.YES if prepared and wanted else Sync.UNSURE if prepared or wanted else Sync.NO


def broadcast(wrapper: DistributedDataParallel, tensors: list[Tensor]) -> None:
    """Give all processes of a wrapper the values of the first one. A collective: all give the same shapes."""
    group = wrapper.process_group
    if dist.get_world_size(group) > 1:
        works = [dist.broadcast(tensor, group=group, group_src=0, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()


def living_wrappers() -> list[DistributedDataParallel]:
    """Return every DistributedDataParallel of the process. Takes tens of milliseconds in a process group."""
    objects = gc.get_objects() if _AVAILABLE and dist.is_initialized() else ()
    # By type: a proxy may answer for what it stands for.
    return [found for found in objects if issubclass(type(found), DistributedDataParallel)]


def watch_wrappers(
    watcher: object,
) -> tuple[list[weakref.ref[DistributedDataParallel]], weakref.finalize[..., Any]]:
    """Return references to every DistributedDataParallel of the process, a list that grows as others are made.

    It grows until ``watcher`` is gone, or what is returned with it was called.
    """
    found = list(map(weakref.ref, living_wrappers()))

    def registered(parent: Module, name: str, child: Module | None) -> None:
        if name == "module" and isinstance(parent, DistributedDataParallel):
            found.append(weakref.ref(parent))

    return found, weakref.finalize(watcher, listen(module_registered=registered).close)
