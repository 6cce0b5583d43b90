"""Half parameters and their masters by group of the optimizer, under the names of Apex."""

from __future__ import annotations

from torch import Tensor


class GroupsOfMasters:
    """Gives what has pairs of parameters and masters, and the groups of an optimizer, the lists that programs read."""

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each half parameter with its master."""
        raise NotImplementedError

    def _groups(self) -> list[list[Tensor]]:
        """Return what the optimizer steps, a list for each group."""
        raise NotImplementedError

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The half parameters of the model, a list for each group."""
        halves = {id(master): half for half, master in self._pairs()}
        return [[halves[id(param)] for param in group if id(param) in halves] for group in self._groups()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of ``fp16_groups``, in the same order."""
        masters = {id(master) for _, master in self._pairs()}
        return [[param for param in group if id(param) in masters] for group in self._groups()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The parameters that have no masters, since they are in fp32 in the model, a list for each group."""
        masters = {id(master) for _, master in self._pairs()}
        return [[param for param in group if id(param) not in masters] for group in self._groups()]
