"""Compares what checkpoints hold, bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def flat(state: Any, path: str = "") -> dict[str, Any]:
    """Return a nest of dicts and lists as one dict by path, with copies of its tensors, which are whole."""
    if isinstance(state, (list, tuple)):
        state = dict(enumerate(state))
    if isinstance(state, dict):
        return {name: leaf for key, item in state.items() for name, leaf in flat(item, f"{path}.{key}").items()}
    if isinstance(state, Tensor):
        tensor: Any = state
        state = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
    return {path: state}


def differences(one: Any, other: Any) -> list[str]:
    """Name the places where two states differ in a bit."""
    first, second = flat(one), flat(other)
    shared = first.keys() & second.keys()
    return sorted(first.keys() ^ second.keys()) + sorted(key for key in shared if not _same(first[key], second[key]))


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if not isinstance(one, Tensor):
        return bool(one == other)
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
