"""Gradients that several ranks have a part in: checked after their reduction, whole or in shards.

A rank knows what its own backward passes found. A reduction may bring inf and nan from other ranks. So all ranks look
at what came out of it, and step or skip alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.scaling.gradients import unscale_
from autoamp.torch_private import unscale_and_check_

__all__ = ["is_flat", "is_sharded", "non_finite_now"]


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a tensor is torch's DTensor, of which a rank has a part: what `fully_shard` makes of parameters."""
    return type(tensor) is not Tensor and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def is_flat(tensor: Tensor) -> bool:
    """Tell whether a tensor is a flat parameter of `FullyShardedDataParallel`."""
    return bool(getattr(tensor, "_is_flat_param", False))


@torch.no_grad()
def non_finite_now(params: Iterable[Tensor], known: Sequence[Tensor]) -> list[Tensor]:
    """Look for inf and nan in every ``param.grad``, in one pass over them.

    Where gradients are shards all ranks of their mesh come to the same answer, by a collective, as under torch's own
    `GradScaler`; each of them must call this.

    Args:
        params: The parameters, of which those without gradients are passed over.
        known: Flags of what this rank has found before, of which the other ranks of a mesh are told.

    Returns:
        Flags as `autoamp.scaling.unscale_` returns them.
    """
    plain: list[Tensor] = []
    shards: dict[Any, list[Tensor]] = {}
    for param in params:
        gradient: Any = param.grad
        if gradient is not None and is_sharded(gradient):
            shards.setdefault((gradient.device_mesh, gradient.placements, gradient.dtype), []).append(gradient)
        elif gradient is not None:
            plain.append(param)
    found = unscale_(plain, 1.0)
    for gradients in shards.values():
        device = gradients[0].device
        flags = [flag.to(device).view(()) for flag in (*known, *found)]
        flag = torch.stack(flags).amax().view(1) if flags else torch.zeros(1, device=device)
        unscale_and_check_(gradients, flag, torch.ones((), device=device))
        found.append(flag)
    return found
