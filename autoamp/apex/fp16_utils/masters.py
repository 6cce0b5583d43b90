"""The masters of an optimizer by the names that programs read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.tensors import flatten, unflatten


class GroupsOfMasters:
    """Gives what has the groups of an optimizer, and its masters or None, the lists that programs read."""

    param_groups: Any
    _masters: Any

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each half parameter with its master."""
        return [] if self._masters is None else self._masters.pairs

    def _by_group(self, found: Mapping[int, Tensor]) -> list[list[Tensor]]:
        return [[found[id(param)] for param in group["params"] if id(param) in found] for group in self.param_groups]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The half parameters of the model, a list for each group."""
        return self._by_group({id(master): half for half, master in self._pairs()})

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of ``fp16_groups``, in the same order."""
        return self._by_group({id(master): master for _, master in self._pairs()})

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The parameters that have no masters, since they are in fp32 in the model, a list for each group."""
        masters = {id(master) for _, master in self._pairs()}
        return [[param for param in group["params"] if id(param) not in masters] for group in self.param_groups]

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """Half parameters of the model."""
        return [half for half, _ in self._pairs()]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """Their masters, in the same order."""
        return [master for _, master in self._pairs()]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """Parameters that are stepped themselves."""
        return [param for group in self.fp32_from_fp32_groups for param in group]


def flat_masters(masters: Sequence[Tensor]) -> Tensor:
    """Return a group's masters as one tensor. Where they do not lie side by side yet, their data move into it."""
    ends = itertools.accumulate((master.nbytes for master in masters), initial=masters[0].data_ptr() if masters else 0)
    parts = [master.detach() for master in masters]
    if all(part.is_contiguous() and part.data_ptr() == at for part, at in zip(parts, ends, strict=False)) and parts:
        return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))
    flat = flatten(parts) if parts else torch.empty(0)
    for master, part in zip(masters, unflatten(flat, masters), strict=True):
        master.data = part
    return flat
