"""Ranks of a wrapper that reduces gradients, telling one another what each found of a step that all of them skip.

They write to the store of the process group and read there, with a limit of time. That is no collective: a rank that
does not trace, and so never comes, holds nobody up for longer than that, and once.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from autoamp.torch_private import default_store

__all__ = ["Comparison", "TracingRanks"]

_PREFIX = "autoamp/overflow"
# How long to wait for a rank to come to the skipped step, where it is already unless it does not trace at all; and for
# one that has come, to find what there is.
_TO_COME = datetime.timedelta(seconds=20)
_TO_FIND = datetime.timedelta(minutes=10)


class TracingRanks:
    """The ranks that trace overflows, as far as known.

    Attributes:
        alone: Whether some rank was found not to trace, so that nobody waits for any any more.
    """

    def __init__(self) -> None:
        self.alone = False
        self._life: str | None = None
        self._number = 0

    def begin(self, wrapper: Module) -> Comparison | None:
        """Let the other ranks know that this one looks at a step; None where there is nobody to compare with.

        Args:
            wrapper: What reduces gradients. Its ranks skip the same steps.
        """
        store = None if self.alone else default_store()
        if store is None:
            return None
        group = getattr(wrapper, "process_group", None)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        own = dist.get_rank()
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self._life is None:
                # Each rank makes as many handles as the others; keys of an earlier one are not read again.
                self._life = str(store.add(f"{_PREFIX}/lives/{own}", 1))
            self._number += 1
            key = f"{_PREFIX}/{self._life}/{'-'.join(map(str, ranks))}/{self._number}"
            store.set(f"{key}/began/{own}", "1")
            return Comparison(self, store, key, own, [rank for rank in ranks if rank != own])
        return None


class Comparison:
    """One skipped step, looked at by several ranks.

    Args:
        tracing: Hears of ranks that do not come.
        store: Where they meet.
        key: Of the step.
        own: This rank.
        others: The other ranks.
    """

    def __init__(self, tracing: TracingRanks, store: Any, key: str, own: int, others: Sequence[int]) -> None:
        self._tracing = tracing
        self._store = store
        self._key = key
        self._own = own
        self._others = others

    def tell(self, blames: bool | None) -> None:
        """Tell the others whether this rank's own gradients overflowed; None where it could not find out."""
        self._store.set(f"{self._key}/found/{self._own}", {True: "yes", False: "no", None: "unknown"}[blames])

    def hear(self) -> dict[int, bool | None] | None:
        """Return for each other rank whether its own gradients overflowed; None where a rank does not trace."""
        found: dict[int, bool | None] = {}
        for rank in self._others:
            if not self._came(f"{self._key}/began/{rank}", _TO_COME):
                self._tracing.alone = True
                return None
            known = self._came(f"{self._key}/found/{rank}", _TO_FIND)
            told = self._store.get(f"{self._key}/found/{rank}") if known else b"unknown"
            found[rank] = {b"yes": True, b"no": False}.get(bytes(told))
        return found

    def _came(self, key: str, limit: datetime.timedelta) -> bool:
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._store.wait([key], limit)
            return True
        return False
