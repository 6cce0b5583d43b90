"""Ranks of a wrapper that reduces gradients, telling one another what each found of a step that all of them skip.

They write to the store of the process group and read there, with a limit of time. That is no collective: a rank that
does not trace, and so never comes, holds nobody up for longer than that, and once.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from autoamp.torch_private import default_store

__all__ = ["Comparison", "TracingRanks"]

_PREFIX = "autoamp/overflow"


@dataclass
class TracingRanks:
    """The ranks that trace overflows, as far as known.

    Attributes:
        to_come: How long to wait for a rank to come to the skipped step, where it is unless it does not trace at all.
        to_find: How long to wait for what a rank finds that has come.
        alone: Whether some rank was found not to trace, so that nobody waits for any any more.
    """

    to_come: datetime.timedelta = datetime.timedelta(seconds=20)
    to_find: datetime.timedelta = datetime.timedelta(minutes=10)
    alone: bool = False
    _steps: Iterator[str] | None = None

    def begin(self, wrapper: Module) -> Comparison | None:
        """Let the other ranks know that this one looks at a step; None where there is nobody to compare with.

        Args:
            wrapper: What reduces gradients. Its ranks skip the same steps.
        """
        store = None if self.alone else default_store()
        if store is None:
            return None
        ranks = dist.get_process_group_ranks(getattr(wrapper, "process_group", None) or dist.group.WORLD)
        own = dist.get_rank()
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self._steps is None:
                # Each rank makes as many handles as the others; keys of an earlier one are not read again.
                life = store.add(f"{_PREFIX}/lives/{own}", 1)
                self._steps = (f"{_PREFIX}/{life}/{number}" for number in itertools.count())
            key = f"{next(self._steps)}/{'-'.join(map(str, ranks))}"
            store.set(f"{key}/began/{own}", "1")
            return Comparison(self, store, key, own, [rank for rank in ranks if rank != own])
        return None


@dataclass(frozen=True)
class Comparison:
    """One skipped step, looked at by several ranks.

    Attributes:
        tracing: Hears of ranks that do not come.
        store: Where they meet.
        key: Of the step.
        own: This rank.
        others: The other ranks.
    """

    tracing: TracingRanks
    store: Any
    key: str
    own: int
    others: Sequence[int]

    def tell(self, blames: bool | None) -> None:
        """Tell the others whether this rank's own gradients overflowed; None where it could not find out."""
        self.store.set(f"{self.key}/found/{self.own}", {True: "yes", False: "no", None: "unknown"}[blames])

    def hear(self) -> dict[int, bool | None] | None:
        """Return for each other rank whether its own gradients overflowed; None where a rank does not trace."""
        found: dict[int, bool | None] = {}
        for rank in self.others:
            if not self._came(f"{self.key}/began/{rank}", self.tracing.to_come):
                self.tracing.alone = True
                return None
            known = self._came(f"{self.key}/found/{rank}", self.tracing.to_find)
            told = self.store.get(f"{self.key}/found/{rank}") if known else b"unknown"
            found[rank] = {b"yes": True, b"no": False}.get(bytes(told))
        return found

    def _came(self, key: str, limit: datetime.timedelta) -> bool:
        with contextlib.suppress(dist.DistError, RuntimeError):
            self.store.wait([key], limit)
            return True
        return False
