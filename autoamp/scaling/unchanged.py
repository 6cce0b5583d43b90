"""Whether gradients are the ones that were looked through, with the values that they had then.

Torch counts what is written to a tensor, but not what its collectives write. So what was found in gradients may not be
true any more once a program has reduced them by itself, and they are looked through again before a step, unless their
process groups tell that nothing was reduced: `Looked` asks for both. What a program exchanges by other means than torch
is written by torch in the end, and told by the tensors' versions. A program whose gradients `DistributedDataParallel`
has reduced has no use for such means, and there the process groups are asked alone.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from autoamp.torch_private import begun_collectives, process_groups

__all__ = ["Looked", "collectives_so_far"]

# Backends that count whatever they exchange, messages of one rank to another included. NCCL counts those apart.
_COUNT_ALL = frozenset(("gloo",))

_version = operator.attrgetter("_version")


def collectives_so_far() -> tuple[int, int] | None:
    """Return how many process groups there are, and how many collectives and messages all of them have begun.

    None where that is not known: of backends that do not count all that they exchange.
    """
    begun, groups = 0, process_groups()
    for group, (backend, _) in groups.items():
        if backend not in _COUNT_ALL:
            return None
        begun += begun_collectives(group)
    return (len(groups), begun) if groups else None


class Looked:
    """Remembers gradients that have just been looked through, to tell later whether to look again is of any use.

    It refers to tensors weakly, and takes one look at each, not at their values.

    Args:
        grads: The gradients; None where an exchange by torch's process groups is all that may have changed them. Writes
            to a part of a DTensor by itself are not told.
    """

    __slots__ = ("_begun", "_grads", "_versions")

    def __init__(self, grads: Sequence[Tensor] | None) -> None:
        self._begun = collectives_so_far()
        self._grads: list[weakref.ref[Tensor]] | None = None
        if self._begun is None or grads is None:
            return
        try:
            self._versions = [*map(_version, grads)]
        except RuntimeError:
            # Inference tensors have no versions.
            self._begun = None
            return
        self._grads = [*map(weakref.ref, grads)]

    def still_holds(self, grads: Callable[[], Sequence[Tensor]]) -> bool:
        """Tell for sure that nothing was exchanged since, and that gradients are the same tensors, not written to.

        Args:
            grads: Gives the gradients as they are now; called where they are to be looked at.
        """
        if self._begun is None or collectives_so_far() != self._begun:
            return False
        if self._grads is None:
            return True
        now = grads()
        return (
            len(now) == len(self._grads)
            and all(map(operator.is_, map(operator.call, self._grads), now))
            and [*map(_version, now)] == self._versions
        )
