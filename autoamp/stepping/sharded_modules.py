"""Modules whose parameters were replaced by shards, and optimizers that do not go with them.

`fully_shard` and `parallelize_module` put new parameters in the place of those that a module had. An optimizer that was
made before steps what is in no module any more, and torch says nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from autoamp.errors import UsageError
from autoamp.scaling import is_sharded

__all__ = ["refuse_left_behind"]


def refuse_left_behind(name: str, params: Iterable[Tensor]) -> None:
    """Raise UsageError where shards were put in the place of parameters that an optimizer steps.

    That is what `fully_shard` and `parallelize_module` do. Looks at all objects of the process where the optimizer has
    parameters without gradients, and DTensors were imported.

    Args:
        name: Of the optimizer, for the message.
        params: Its parameters; the model's own, not their masters.
    """
    lost = [param for param in params if param.requires_grad and param.grad is None and not is_sharded(param)]
    started = dist.is_available() and dist.is_initialized()
    if not lost or not started or "torch.distributed.tensor" not in sys.modules:
        return
    # By type: a proxy may answer for what it stands for. A module that is half built has no parameters yet.
    modules = [vars(found) for found in gc.get_objects() if issubclass(type(found), Module)]
    present = [param for own in modules for param in (own.get("_parameters") or {}).values() if param is not None]
    in_modules = set(map(id, present))
    shapes = {param.shape for param in present if is_sharded(param)}
    # What is in no module may belong to the program itself: then no shard is like it.
    lost = [param for param in lost if id(param) not in in_modules and param.shape in shapes]
    if lost:
        raise UsageError(
            f"{len(lost)} parameters of {name}, the first of shape {tuple(lost[0].shape)}, have no gradient and are in "
            "no module any more: fully_shard or parallelize_module replaced them by shards after the optimizer was "
            "made. Make the optimizer afterwards; if the opt level casts the model, in this order: "
            "initialize(model), fully_shard(model), the optimizer"
        )
