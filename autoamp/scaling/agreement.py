"""One answer for all ranks: who has to agree on the step of an optimizer, and the one small collective by which.

Ranks have gradients of their own: shards, stages of a pipeline, experts. Each looks at what it has. One sum over the
process group that spans all of them then tells every rank what any of them found, verdict by verdict, and with it the
norm of all gradients where somebody clips. A loss scale that hears the same on all ranks stays equal.

On a CPU it is a sum of the norm and one or two numbers that hold all the rest. Gloo cuts what it sums into one part for
each rank and sends each part round; where ranks share cores that takes ten times as long for 32 numbers as for 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoamp.errors import UsageError
from autoamp.scaling.shards import copies_in_mesh, has_shards, is_sharded, local_of, meshes_of
from autoamp.torch_private import root_of_mesh

__all__ = ["Agreements", "AskedGroup", "Ballot", "Together"]

# Numbers that all agree on: the norm; who votes; what loss is inf by itself; what the gradients are like now; and one
# for each verdict. More verdicts than that share the last one.
_NORM, _VOTERS, _HOPELESS, _NOW, _FIRST, _SIZE = 0, 1, 2, 3, 4, 32
# For at least so many verdicts there is room in what is sent on a CPU.
_LEAST_ROOM = 12
# Integers of so many bits are exact in fp64.
_EXACT_BITS = 53


@dataclass(frozen=True)
class AskedGroup:
    """A process group over which the program wants verdicts to be shared.

    Attributes:
        group: The process group.
        replicas: How many of its ranks have the same parameters.
    """

    group: Any
    replicas: int

    @classmethod
    def of(cls, group: Any, replicas: int | None) -> AskedGroup:
        """Check what a program gave.

        Raises:
            UsageError: This is no process group that this rank is in, or ``replicas`` does not divide its size.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError("there is no process group yet; call torch.distributed.init_process_group() first")
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(
                f"group={group!r} is no process group that this rank is in; give torch.distributed.group.WORLD, what "
                "new_group() returned, or mesh.get_group()"
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
class Together:
    """The ranks that agree on the steps of an optimizer.

    Attributes:
        group: Their process group.
        device: Where its collectives take place.
        replicas: How many of its ranks have the same plain parameters.
        asked: Whether the program asked for it, so that every step is agreed on.
    """

    group: Any
    device: torch.device
    replicas: int
    asked: bool

    def copies_of(self, tensor: Tensor) -> int:
        """Return how many ranks have the same part of a tensor."""
        if not is_sharded(tensor):
            return self.replicas
        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        return copies_in_mesh(tensor) * max(1, self.replicas // int(mesh.size()))


class Agreements:
    """Finds out who agrees on an optimizer's steps, and remembers it: to ask again costs a look at the parameters."""

    def __init__(self) -> None:
        self._known: tuple[list[Any], AskedGroup | None, Together | None] | None = None

    def among(self, params: Sequence[Tensor], asked: AskedGroup | None) -> Together | None:
        """Return who agrees on the steps of these parameters; None where nobody has to be asked.

        The first time it may be a collective of those who do: a process group is made where none spans them.

        Raises:
            UsageError: The group that was asked for and the parameters' meshes do not lie within one another.
        """
        if asked is None and not has_shards(params):
            return None
        meshes = meshes_of(params)
        if self._known is not None:
            known, known_asked, together = self._known
            # The meshes that are known are referred to, so that none takes the address of another.
            if known_asked is asked and len(known) == len(meshes) and all(map(_same, known, meshes)):
                return together
        together = _together(params, meshes, asked)
        self._known = (meshes, asked, together)
        return together


class Ballot:
    """What one rank says of a step, and once it was cast what all ranks say.

    Args:
        verdicts: What each of its verdicts found, in the order of the blocks: flags that are 0 or 1.
        now: What is found in the gradients as they are now.
        votes: Whether a block or pass has left a verdict with this rank.
        hopeless: Whether the loss is inf or nan at any scale.
        norm: The p-th power of the norm of this rank's part of the gradients; the norm itself for the largest value.
    """

    def __init__(
        self,
        verdicts: Sequence[Sequence[Tensor]],
        now: Sequence[Tensor],
        *,
        votes: bool,
        hopeless: bool = False,
        norm: Tensor | None = None,
    ) -> None:
        self._verdicts = verdicts
        self._now = now
        self._head = (0.0, float(votes), float(hopeless))
        self._norm = norm
        self._all = torch.zeros(0)
        self._last = _SIZE - 1

    def cast(self, together: Together, *, largest: bool = False) -> Ballot:
        """Share it with all ranks: one collective, of which each of them must be part. Returns itself.

        Args:
            together: Who agrees.
            largest: Take the largest of the norms, not their sum.
        """
        if together.device.type == "cpu" and not largest:
            self._cast_packed(together.group)
            return self
        device = together.device
        flags = [_any(found, device) for found in self._verdicts]
        room = _SIZE - _FIRST
        if len(flags) > room:
            flags = [*flags[: room - 1], _any(flags[room - 1 :], device)]
        # Every rank is told of everything here too, should their blocks not match.
        now = _any([*self._now, *flags], device)
        spare = room - len(flags)
        head = torch.tensor(self._head, device=device)
        vector = torch.cat([head, now, *flags, torch.zeros(spare, device=device)])
        if self._norm is not None:
            vector[_NORM] = self._norm.to(device)
        dist.all_reduce(vector, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=together.group)
        vector[_VOTERS:].clamp_(max=1.0)
        self._all = vector
        return self

    def _cast_packed(self, group: Any) -> None:
        ranks = dist.get_world_size(group)
        room = min(_SIZE - _FIRST, _places(ranks) - len(self._head))
        flags = [_is_any(found) for found in self._verdicts]
        now = _is_any(self._now) or any(flags)
        if len(flags) > room:
            flags = [*flags[: room - 1], any(flags[room - 1 :])]
        _, votes, hopeless = self._head
        norm = 0.0 if self._norm is None else float(self._norm)
        vector = torch.tensor([norm, *packed([bool(votes), bool(hopeless), now, *flags], ranks)], dtype=torch.float64)
        dist.all_reduce(vector, dist.ReduceOp.SUM, group=group)
        norm, *numbers = vector.tolist()
        self._all = torch.tensor([norm, *unpacked(numbers, ranks)[: _NOW + room]])
        self._last = _NOW + room

    def verdict(self, place: int) -> Tensor:
        """Return what all ranks found for one verdict: 1.0, of shape ``[1]``, where one of them found inf or nan."""
        place = min(_FIRST + place, self._last)
        return self._all[place : place + 1]

    @property
    def now(self) -> Tensor:
        """What all ranks found in their gradients as they are now, and in any verdict; as `verdict`."""
        return self._all[_NOW : _NOW + 1]

    @property
    def norm(self) -> Tensor:
        """The sum of what the ranks gave as norms, or the largest, without dimensions."""
        return self._all[_NORM]

    def has_voters(self) -> bool:
        """Tell whether a block or pass has left a verdict with any rank. Waits for the device."""
        return bool(self._all[_VOTERS])

    def is_hopeless(self) -> bool:
        """Tell whether the loss of any rank is inf or nan at any scale. Waits for the device."""
        return bool(self._all[_HOPELESS])


def _places(ranks: int) -> int:
    """Return how many yes or no each of these ranks can say by `packed`."""
    in_one = _EXACT_BITS // ranks.bit_length()
    return in_one * -(-(_FIRST - 1 + _LEAST_ROOM) // in_one)


def packed(said: Sequence[bool], ranks: int) -> list[float]:
    """Return numbers whose sums over ranks tell how many of them said yes at each place; see `unpacked`.

    Args:
        said: Yes or no, in the order of the places; no for those that follow, of which there are the more the fewer
            ranks there are.
        ranks: How many ranks add theirs up, below 2^53.
    """
    width = ranks.bit_length()
    in_one = _EXACT_BITS // width
    numbers = [0] * (_places(ranks) // in_one)
    for place, yes in enumerate(said):
        numbers[place // in_one] |= int(yes) << (width * (place % in_one))
    return [float(number) for number in numbers]


def unpacked(sums: Sequence[float], ranks: int) -> list[float]:
    """Return for each place 1.0 if any of the ranks said yes there, and else 0.0."""
    width = ranks.bit_length()
    in_one, mask = _EXACT_BITS // width, (1 << width) - 1
    return [float(bool(int(one) >> (width * place) & mask)) for one in sums for place in range(in_one)]


def _is_any(flags: Sequence[Tensor]) -> bool:
    """Tell whether a flag is not 0; nan, which is none, counts."""
    return any(flag.item() != 0.0 for flag in flags)


def _any(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    if not flags:
        return torch.zeros(1, device=device)
    moved = [flag.to(device, non_blocking=True).view(1) for flag in flags]
    return moved[0] if len(moved) == 1 else torch.cat(moved).amax().view(1)


def _same(one: object, other: object) -> bool:
    return one is other


def _together(params: Sequence[Tensor], meshes: Sequence[Any], asked: AskedGroup | None) -> Together | None:
    own = dist.get_rank()
    spans = {mesh: frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes}
    spans = {mesh: span for mesh, span in spans.items() if own in span and len(span) > 1}
    if not spans and asked is None:
        return None
    ranks = _spanned(spans)
    device = _device_of([*spans], params)
    if asked is None:
        return Together(_group_of(ranks, spans), device, len(ranks), asked=False)
    wanted = frozenset(dist.get_process_group_ranks(asked.group))
    if ranks <= wanted:
        return Together(asked.group, device, asked.replicas, asked=True)
    if wanted < ranks:
        return Together(_group_of(ranks, spans), device, len(ranks) * asked.replicas // len(wanted), asked=True)
    raise UsageError(
        f"steps are to be agreed on over the ranks {sorted(wanted)}, and parameters lie on meshes of the ranks "
        f"{sorted(ranks)}: neither has all of the other; give sync_over() a group of all of these ranks"
    )


def _spanned(spans: dict[Any, frozenset[int]]) -> frozenset[int]:
    """Return all ranks that are concerned where these meshes are, of which this rank knows its own alone.

    Rank 0 of a mesh of 2 x 2 that has parameters along either of its dimensions meets ranks 1 and 2, and by way of
    these rank 3. Of meshes cut from one they are those along the dimensions of any; of others, all ranks.
    """
    widest = max(spans.values(), key=len, default=frozenset[int]())
    if all(span <= widest for span in spans.values()):
        return widest
    every = frozenset(range(dist.get_world_size()))
    roots = [root_of_mesh(mesh) for mesh in spans]
    if any(root is None or root is not roots[0] for root in roots):
        return every
    names = {name for mesh in spans for name in (mesh.mesh_dim_names or ())}
    if not names or not names.issubset(roots[0].mesh_dim_names or ()):
        return every
    place = [
        slice(None) if name in names else at
        for name, at in zip(roots[0].mesh_dim_names, roots[0].get_coordinate(), strict=True)
    ]
    return frozenset(roots[0].mesh[tuple(place)].flatten().tolist())


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
