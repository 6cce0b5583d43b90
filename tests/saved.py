"""Counts the bytes that are saved for a backward pass."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class SavedTensors:
    """Counts while a with statement runs: each storage once, and none of some tensors, such as the parameters.

    Args:
        apart: These tensors.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        self._apart = {_address(tensor) for tensor in apart}
        # Held until all are counted, so that no address is taken twice.
        self._saved: dict[int, Tensor] = {}
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        # Not the tensor itself: it would hold the graph that it is saved in.
        detached = tensor.detach()
        if _address(tensor) not in self._apart:
            self._saved.setdefault(_address(tensor), detached)
        return detached

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def bytes_by_dtype(self, device_type: str = "cuda") -> dict[torch.dtype, int]:
        """Return how many there are on devices of a type."""
        found: collections.Counter[torch.dtype] = collections.Counter()
        for tensor in self._saved.values():
            if tensor.device.type == device_type:
                found[tensor.dtype] += tensor.untyped_storage().nbytes()
        return dict(found)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
