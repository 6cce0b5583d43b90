"""Compares the settings of ranks that train together, once, at the first step, through the process group's store.

A rank without autoamp would leave a collective waiting for ever. So each rank writes what it has into the key-value
store by which the process group was made, and the lowest rank reads and compares. No collective is made, and whoever
does not answer is named once the time is up. The first rank writes its verdict there, and all raise the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autoamp.core.links import master_of
from autoamp.core.ranks import kept_equal, living_wrappers, meshes_of
from autoamp.errors import UsageError

# Ranks come to their first step at most so many seconds apart, unless the store gives up earlier.
_PATIENCE = 300.0


def rank_sets(params: Sequence[Tensor], groups: Iterable[Any]) -> list[tuple[int, ...]]:
    """Return the sets of ranks that step together.

    They are those of each DTensor's mesh, of each DistributedDataParallel around a parameter and of each process group.
    """
    found: list[list[int]] = [mesh.mesh.flatten().tolist() for mesh in meshes_of(params)]
    wanted = set(map(id, params))
    for wrapper in living_wrappers():
        kept = kept_equal(wrapper)
        if not wanted.isdisjoint(map(id, [*kept, *map(master_of, kept)])):
            found.append(dist.get_process_group_ranks(wrapper.process_group))
    found += map(dist.get_process_group_ranks, groups)
    return [ranks for ranks in dict.fromkeys(tuple(sorted(one)) for one in found) if len(ranks) > 1]


def compare_ranks(sets: Sequence[Sequence[int]], facts: Mapping[str, str], rules: Mapping[str, str]) -> None:
    """Compare the settings of ranks, all of which call this, once in the life of their process group.

    Args:
        sets: Sets of global ranks, this one among them.
        facts: Settings by name.
        rules: The policy of each target.

    Raises:
        UsageError: A rank has other settings, or gave no sign in time. It is named.
    """
    store: Any = None
    # No process group, or one whose store torch does not give.
    with contextlib.suppress(AttributeError, RuntimeError):
        store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    if store is None:
        return
    own = dist.get_rank()
    places = {_place(ranks): ranks for ranks in sets}
    # An earlier handle has compared the others.
    places = {place: ranks for place, ranks in places.items() if not store.check([f"{place}/{own}"])}
    if not places:
        return
    entry = json.dumps({**facts, **{f"the cast lists' entry for {target}": policy for target, policy in rules.items()}})
    # Publish all keys before waiting: ranks may have their sets in different orders, and would wait for each other.
    for place in places:
        store.set(f"{place}/{own}", entry)
    verdicts = {place: _verdict(store, place, ranks) for place, ranks in places.items() if own == min(ranks)}
    for place, told in verdicts.items():
        store.set(f"{place}/verdict", told)
    for place, ranks in places.items():
        root, verdict = min(ranks), verdicts.get(place)
        if verdict is None:
            # The first rank says within its own patience who is missing.
            is_there = _awaited(store, [f"{place}/verdict"], factor=1.25)
            verdict = store.get(f"{place}/verdict").decode() if is_there else _no_answer([root], own)
        if verdict:
            raise UsageError(verdict)


def _place(ranks: Sequence[int]) -> str:
    # Torchrun may keep a store when it starts processes anew.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"autoamp/{attempt}/{hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]}"


def _awaited(store: Any, keys: Sequence[str], factor: float = 1.0) -> bool:
    """Wait for keys. Returns whether they came."""
    patience = timedelta(seconds=factor * min(_PATIENCE, store.timeout.total_seconds()))
    with contextlib.suppress(RuntimeError):
        store.wait(list(keys), patience)
    return bool(store.check(list(keys)))


def _verdict(store: Any, place: str, ranks: Sequence[int]) -> str:
    """Return how ranks differ, as a message; an empty one where they agree."""
    keys = {rank: f"{place}/{rank}" for rank in ranks}
    if not _awaited(store, list(keys.values())):
        return _no_answer([rank for rank in ranks if not store.check([keys[rank]])], dist.get_rank())
    known = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
    for name in known[ranks[0]] | known[ranks[-1]]:
        by_value: dict[str, list[int]] = {}
        for rank, facts in known.items():
            by_value.setdefault(facts.get(name, "none"), []).append(rank)
        if len(by_value) > 1:
            values = "; ".join(f"{value} on {_named(having)}" for value, having in by_value.items())
            return f"{name} differs between ranks that train together: {values}. Give all of them the same"
    return ""


def _no_answer(missing: Sequence[int], own: int) -> str:
    return (
        f"{_named(missing)} sent nothing at the first step, and rank {own} waits for it: autoamp is not active "
        "there (enabled=False, say), or the rank hangs or takes no step. All ranks that train together need the "
        "same calls of initialize() or init(), and of sync_over() where there is one, and step the same number of "
        "times"
    )


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
