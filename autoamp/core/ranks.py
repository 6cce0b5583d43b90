"""Several processes: which of them agree on the steps of an optimizer, and which parameters they keep equal.

Ranks have gradients of their own: shards, stages of a pipeline, experts. Each looks at what it has. One all-reduce over
the process group that spans all of them then tells every rank what any of them found for each loss scaler, and with it
the norm of all gradients if the program clips. A loss scale that hears the same on all ranks stays equal. Of torch's
DistributedDataParallel the wrappers are known, and what their next backward pass does.

Ranks that train together compare their settings, once, at the first step, through the process group's store. A rank
without autoamp would leave a collective waiting for ever. So each rank writes what it has into the key-value store by
which the process group was made, and the lowest rank reads and compares. No collective is made, and whoever does not
answer is named once the time is up. The first rank writes its verdict there, and all raise the same error.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from autoamp.core.attach import living
from autoamp.core.gradients import grouped_by_kind, is_sharded, local_of, total_norm
from autoamp.core.patches import listen
from autoamp.errors import UsageError
from autoamp.tensors import HALF_DTYPES


def meshes_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the meshes of all DTensors among some tensors, each once."""
    sharded: list[Any] = [tensor for tensor in tensors if is_sharded(tensor)]
    return list({id(tensor.device_mesh): tensor.device_mesh for tensor in sharded}.values())


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


# -- ranks that agree on a step --


@dataclass(frozen=True)
class RequestedGroup:
    """A process group over which the program wants verdicts to be shared.

    Attributes:
        group: The process group.
        replicas: How many of its ranks have the same parameters.
    """

    group: Any
    replicas: int

    @classmethod
    def from_arguments(cls, group: Any, replicas: int | None) -> RequestedGroup:
        """Check what a program gave.

        Raises:
            UsageError: This is no process group that this rank is in, or ``replicas`` does not divide its size.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError("there is no process group yet; call torch.distributed.init_process_group() first")
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(
                f"group={group!r} is not a process group of this rank; pass torch.distributed.group.WORLD, the "
                "result of new_group(), or mesh.get_group()"
            )
        size = dist.get_world_size(group)
        if replicas is None:
            return cls(group, size)
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1 or size % replicas:
            raise UsageError(
                f"replicas={replicas!r} does not divide the {size} ranks of the group; give how many of them have the "
                "same parameters: 1 for stages of a pipeline"
            )
        return cls(group, replicas)


@dataclass(frozen=True)
class SyncGroup:
    """The ranks that agree on the steps of an optimizer.

    Attributes:
        group: Their process group.
        device: Where its collectives take place.
        replicas: How many of its ranks have the same plain parameters.
    """

    group: Any
    device: torch.device
    replicas: int

    def copies_of(self, tensor: Any) -> int:
        """Return how many ranks have the same part of a tensor."""
        if not is_sharded(tensor):
            return self.replicas
        mesh = tensor.device_mesh
        in_mesh: Iterable[int] = (mesh.size(dim) for dim, one in enumerate(tensor.placements) if not one.is_shard())
        return math.prod(in_mesh) * max(1, self.replicas // int(mesh.size()))


@dataclass(frozen=True)
class FoundInfReduction:
    """What all ranks found since the last step. To read a flag is to wait for the device.

    Attributes:
        norm: The sum of what the ranks gave as norms, or the largest, without dimensions.
        has_checks: Whether a block or pass of any rank was checked.
        loss_is_nonfinite: Whether the loss of any rank is inf or nan at any scale.
        now: What all ranks found in their gradients as they are now, and in any check: a flag of shape ``[1]``, not 0
            where one of them found inf or nan.
        of_scalers: Such a flag of each loss scaler.
    """

    norm: Tensor
    has_checks: Tensor
    loss_is_nonfinite: Tensor
    now: Tensor
    of_scalers: Sequence[Tensor]


def reduce_found_inf(
    group: SyncGroup,
    found: Sequence[Sequence[Tensor]],
    now: Sequence[Tensor],
    *,
    has_checks: bool,
    loss_is_nonfinite: bool = False,
    norm: Tensor | None = None,
    largest: bool = False,
) -> FoundInfReduction:
    """Share what one rank found with all: one all-reduce, of which each of them must be part.

    Args:
        group: The ranks.
        found: For each loss scaler the flags of its checks, not 0 for inf or nan. As many on all ranks.
        now: Flags of the gradients as they are now.
        has_checks: Whether a block or pass of this rank was checked.
        loss_is_nonfinite: Whether the loss is inf or nan at any scale.
        norm: The p-th power of the norm of this rank's part of the gradients; the norm itself for ``largest``.
        largest: Take the largest of the norms, not their sum.
    """
    device = group.device
    flags = [_any(one, device) for one in found]
    # Every rank hears of everything here too, should their blocks not match.
    every = _any([*now, *flags], device)
    head = torch.tensor((0.0, float(has_checks), float(loss_is_nonfinite)), device=device)
    vector = torch.cat([head, every, *flags]).to(torch.float64 if device.type == "cpu" else torch.float32)
    if norm is not None:
        vector[0] = norm.to(device)
    dist.all_reduce(vector, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group.group)
    reduced_now, *of_scalers = vector[3:].split(1)
    return FoundInfReduction(vector[0], vector[1], vector[2], reduced_now, of_scalers)


def _any(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    if not flags:
        return torch.zeros(1, device=device)
    moved = [flag.to(device, non_blocking=True).view(1) for flag in flags]
    return moved[0] if len(moved) == 1 else torch.cat(moved).amax().view(1)


def sync_group(params: Sequence[Tensor], meshes: Sequence[Any], asked: RequestedGroup | None) -> SyncGroup | None:
    """Return who agrees on the steps of parameters; None where nobody has to be asked.

    It may be a collective of those who do: a process group is made where none spans them.

    Args:
        params: The parameters.
        meshes: Those of the DTensors among them, by `meshes_of`.
        asked: The group that the program asked for.

    Raises:
        UsageError: That group and the parameters' meshes do not lie within one another.
    """
    own = dist.get_rank() if meshes else None
    spans = {mesh: frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes}
    spans = {mesh: span for mesh, span in spans.items() if own in span and len(span) > 1}
    if not spans and asked is None:
        return None
    device = _device_of([*spans], params)
    if asked is None:
        ranks = _spanned(spans)
        return SyncGroup(_group_of(ranks, spans), device, len(ranks))
    ranks = frozenset[int]().union(*spans.values())
    wanted = frozenset(dist.get_process_group_ranks(asked.group))
    if ranks <= wanted:
        return SyncGroup(asked.group, device, asked.replicas)
    if wanted < ranks:
        return SyncGroup(_group_of(ranks, spans), device, len(ranks) * asked.replicas // len(wanted))
    raise UsageError(
        f"sync_over() got the ranks {sorted(wanted)}, and parameters are on meshes of the ranks {sorted(ranks)}; pass "
        "a group of all of these ranks"
    )


def _spanned(spans: dict[Any, frozenset[int]]) -> frozenset[int]:
    """Return all ranks that are concerned where these meshes are, of which this rank knows its own alone.

    Rank 0 of a mesh of 2 x 2 that has parameters along either of its dimensions meets ranks 1 and 2, and by way of
    these rank 3: all of the two meshes' product.
    """
    widest = max(spans.values(), key=len, default=frozenset[int]())
    across = {span for span in spans.values() if not span <= widest} | {widest}
    if len(across) == 1:
        return widest
    if math.prod(map(len, across)) == dist.get_world_size():
        return frozenset(range(dist.get_world_size()))
    ranks = " and ".join(map(str, sorted(map(sorted, across))))
    raise UsageError(
        f"parameters are on orthogonal meshes, of the ranks {ranks}; call handle.sync_over(group) with a group of all "
        "ranks that have such meshes in common"
    )


def _group_of(ranks: frozenset[int], spans: dict[Any, frozenset[int]]) -> Any:
    """Return a process group of these ranks: one that is there, or else a new one, which they alone have to make."""
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    for mesh in spans:
        if mesh.ndim == 1 and spans[mesh] == ranks:
            return mesh.get_group()
    key = (id(dist.group.WORLD), ranks)
    if key not in _made:
        # One of an earlier default group is of no use any more.
        for other in [other for other in _made if other[0] != key[0]]:
            del _made[other]
        _made[key] = dist.group.WORLD, dist.new_group(sorted(ranks), use_local_synchronization=True)
    return _made[key][1]


# Groups that were made here, by their ranks, with the default group of their time. A process group is the process's,
# and optimizers of one mesh share it.
_made: dict[tuple[int, frozenset[int]], tuple[Any, Any]] = {}


def _device_of(meshes: Iterable[Any], params: Sequence[Tensor]) -> torch.device:
    # Parameters of a mesh may be offloaded to the host, where its groups have no backend.
    for mesh in meshes:
        if mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
    return local_of(params[0]).device if params else torch.device("cpu")


@torch.no_grad()
def powered_norm(params: Sequence[Tensor], group: SyncGroup | None, norm_type: float) -> Tensor:
    """Return the p-th power of the norm of this rank's part of all gradients, so that those of all ranks add up.

    What several ranks have alike is divided by their number. For ``inf`` it is the largest absolute value.

    Args:
        params: Those of which the gradients count.
        group: Whose parts are added, None for this rank's alone.
        norm_type: The p of the p-norm, above 0.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            copies = 1 if group is None else group.copies_of(param.grad)
            by_copies.setdefault(copies, []).append(local_of(param.grad))
    norms = {copies: total_norm(grads, norm_type) for copies, grads in by_copies.items()}
    if not norms:
        return torch.zeros(())
    device = next(iter(norms.values())).device
    if norm_type == torch.inf:
        return torch.stack([norm.to(device) for norm in norms.values()]).amax()
    return torch.stack([norm.to(device) ** norm_type / copies for copies, norm in norms.items()]).sum()


@torch.no_grad()
def clip_(params: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients in place by ``max_norm / (norm + 1e-6)`` where that is below 1.

    That is the rule of `torch.nn.utils.clip_grad_norm_`: a norm that fp32 does not hold makes finite gradients 0. If
    the norm is nan, gradients are unchanged.

    Args:
        params: Those whose gradients are meant.
        norm: The norm of all of them, without dimensions.
        max_norm: The highest norm.
    """
    if max_norm == math.inf:
        return
    factor = torch.where(norm.isnan(), 1.0, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    distinct = {id(param.grad): param.grad for param in params if param.grad is not None}
    for (device, dtype), grads in grouped_by_kind(map(local_of, distinct.values())).items():
        torch._foreach_mul_(grads, factor.to(device=device, dtype=dtype))


# -- DistributedDataParallel --


class Sync(enum.Enum):
    """Whether the backward pass that follows the last forward pass reduces gradients."""

    YES = enum.auto()
    NO = enum.auto()
    UNSURE = enum.auto()


def kept_equal(wrapper: DistributedDataParallel) -> list[Tensor]:
    """Return the parameters that a DistributedDataParallel keeps equal."""
    ignored = wrapper.parameters_to_ignore
    return [param for name, param in wrapper.module.named_parameters() if name not in ignored]


def next_sync(wrapper: DistributedDataParallel | None) -> Sync:
    """Tell what the backward pass at hand does; to be asked between the forward pass and it.

    The forward pass decides, and leaves ``require_forward_param_sync``; but so does one without gradients.
    """
    if wrapper is None:
        return Sync.NO
    prepared, wanted = wrapper.require_forward_param_sync, wrapper.require_backward_grad_sync
    return Sync.YES if prepared and wanted else Sync.UNSURE if prepared or wanted else Sync.NO


def broadcast(wrapper: DistributedDataParallel, tensors: list[Tensor]) -> None:
    """Give all processes of a wrapper the values of the first one. A collective: all give the same shapes."""
    group = wrapper.process_group
    if dist.get_world_size(group) > 1:
        works = [dist.broadcast(tensor, group=group, group_src=0, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()


def living_wrappers() -> list[DistributedDataParallel]:
    """Return every DistributedDataParallel of the process. Takes tens of milliseconds in a process group."""
    return living(DistributedDataParallel) if dist.is_available() and dist.is_initialized() else []


def watch_wrappers(
    watcher: object,
) -> tuple[list[weakref.ref[DistributedDataParallel]], weakref.finalize[..., Any]]:
    """Return references to every DistributedDataParallel of the process, a list that grows as others are made.

    It grows until ``watcher`` is gone, or what is returned with it was called.
    """
    found = list(map(weakref.ref, living_wrappers()))

    def registered(parent: Module, name: str, child: Module | None) -> None:
        if name == "module" and isinstance(parent, DistributedDataParallel):
            found.append(weakref.ref(parent))

    return found, weakref.finalize(watcher, listen(module_registered=registered).close)


# -- settings that ranks have alike --

# Ranks come to their first step at most so many seconds apart, unless the store gives up earlier.
_PATIENCE = 300.0


def rank_sets(
    params: Sequence[Tensor], groups: Iterable[Any], master_of: Callable[[Tensor], Tensor | None]
) -> list[tuple[int, ...]]:
    """Return the sets of ranks that step together.

    They are those of each DTensor's mesh, of each DistributedDataParallel around a parameter and of each process group.

    Args:
        params: What an optimizer steps.
        groups: The process groups.
        master_of: Returns the master of a half parameter that a DistributedDataParallel keeps; None for none.
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
