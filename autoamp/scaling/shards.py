"""Tensors of which a rank has a part: torch's DTensors, and the flat parameters of `FullyShardedDataParallel`.

A rank works on its own part of a DTensor, so that nothing here is a collective, but for `reduce_partial`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autoamp.tensors import HALF_DTYPES

_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is torch's DTensor, of which a rank has a part: what `fully_shard` makes of parameters."""
    kind = type(tensor)
    # Of the class: a DTensor's own are properties in Python, and this is asked of every parameter.
    return kind is not Tensor and hasattr(kind, "device_mesh") and hasattr(kind, "placements")


def is_flat(tensor: Tensor) -> bool:
    """Whether a tensor is a flat parameter of `FullyShardedDataParallel`."""
    return bool(getattr(tensor, "_is_flat_param", False))


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank has, which shares its memory; any other tensor as it is."""
    # To enter `no_grad` costs more than to ask a plain tensor for its type.
    if type(tensor) in _PLAIN or not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        # A collective may still be at work on it.
        return local.wait() if hasattr(local, "wait") else local


def meshes_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the meshes of all DTensors among some tensors, each once."""
    sharded: list[Any] = [tensor for tensor in tensors if is_sharded(tensor)]
    return list({id(tensor.device_mesh): tensor.device_mesh for tensor in sharded}.values())


def copies_in_mesh(tensor: Any) -> int:
    """Return how many ranks of a DTensor's mesh have the same part of it."""
    sizes = (tensor.device_mesh.size(dim) for dim, one in enumerate(tensor.placements) if not one.is_shard())
    return math.prod(sizes)


@torch.no_grad()
def reduce_partial(params: Iterable[Tensor], *, halves_alone: bool) -> None:
    """Add up gradients of which each rank has an addend: ``param.grad`` has one whole value on all of them.

    A collective of their meshes, which the optimizer would run else. Nothing is done where there is none.

    Args:
        params: The parameters.
        halves_alone: Leave those in fp32 and fp64, whose sums do not overflow where the addends are finite.
    """
    for param in params:
        grad: Any = param.grad
        if grad is None or not is_sharded(grad) or (halves_alone and grad.dtype not in HALF_DTYPES):
            continue
        if any(placement.is_partial() for placement in grad.placements):
            from torch.distributed.tensor import Replicate

            whole = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
            param.grad = grad.redistribute(placements=whole)
