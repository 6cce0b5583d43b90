"""Modules whose parameters were replaced by shards, and optimizers that do not go with them.

`fully_shard` and `parallelize_module` put new parameters in the place of those that a module had. An optimizer that was
made before steps what is in no module any more, and torch says nothing. Nor does it where fp16 gradients are reduced
that nobody has scaled.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from autoamp.errors import UsageError, warn_user
from autoamp.scaling import is_sharded
from autoamp.torch_private import sharded_compute_dtype

__all__ = ["refuse_left_behind", "warn_of_unscaled_shards"]


def refuse_left_behind(name: str, params: Iterable[Tensor]) -> None:
    """Raise UsageError where shards were put in the place of parameters that an optimizer steps.

    That is what `fully_shard` and `parallelize_module` do. Looks at all objects of the process where the optimizer has
    parameters without gradients, and DTensors were imported.

    Args:
        name: Of the optimizer, for the message.
        params: Its parameters; the model's own, not their masters.
    """
    lost = [param for param in params if param.requires_grad and param.grad is None and not is_sharded(param)]
    if not lost or not _may_be_sharded():
        return
    present = [param for module in _objects_of(Module) for param in _own_parameters(module)]
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


def warn_of_unscaled_shards(name: str, params: Sequence[Tensor]) -> None:
    """Warn where `fully_shard` computes in fp16 with parameters that an optimizer steps, and nobody scales the loss.

    Args:
        name: Of the optimizer, for the message.
        params: Its parameters, which are to be stepped.
    """
    own = {id(param) for param in params if is_sharded(param)}
    if not own:
        return
    for module in _sharded_modules():
        halved = sharded_compute_dtype(module) is torch.float16
        if halved and any(id(param) in own for param in module.parameters()):
            if not any(scaler.is_enabled() for scaler in _objects_of(torch.amp.GradScaler)):
                warn_user(
                    f"fully_shard runs this model with param_dtype=torch.float16, and {name} steps by gradients of a "
                    "loss that was not scaled: small ones round to 0, large ones to inf. Scale it (with "
                    "handle.scale_loss(loss, optimizer), handle.auto_scale(), or a loss_scale where it is 1.0), or "
                    "take param_dtype=torch.bfloat16"
                )
            return


def _may_be_sharded() -> bool:
    return dist.is_available() and dist.is_initialized() and "torch.distributed.tensor" in sys.modules


def _sharded_modules() -> list[Any]:
    if not _may_be_sharded():
        return []
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else _objects_of(kind)


def _objects_of(kind: type[Any]) -> list[Any]:
    # By type: a proxy may answer for what it stands for.
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _own_parameters(module: Any) -> list[Tensor]:
    # A module that is half built has none yet.
    own: Any = vars(module).get("_parameters") or {}
    return [param for param in own.values() if param is not None]
