"""Which optimizers step nothing but what torch's DistributedDataParallel reduces over all processes.

What comes of their gradients between a block and the step is this process's own doing, as it is where there is no
other, unless torch's process groups have exchanged something.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from autoamp.scaling import has_shards
from autoamp.stepping.links import master_of
from autoamp.stepping.replicas import WRAPPERS, Replica

__all__ = ["Reduced", "wrappers_of"]


def wrappers_of(params: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """Return each DistributedDataParallel around one of these parameters."""
    wanted = set(map(id, params))
    return [
        wrapper for wrapper in WRAPPERS.standing() if not wanted.isdisjoint(map(id, _stepped(wrapper.parameters())))
    ]


def _stepped(params: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield what an optimizer steps for each parameter of a model."""
    for param in params:
        master = master_of(param)
        yield param if master is None else master


class Reduced:
    """Parameters of an optimizer, for as long as wrappers reduce the gradients of all of them over all processes.

    Args:
        params: All that the optimizer steps.
        wrappers: What `wrappers_of` returns for them.
    """

    __slots__ = ("_params", "_wrappers")

    def __init__(self, params: Sequence[Tensor], wrappers: Iterable[DistributedDataParallel]) -> None:
        whole = [wrapper for wrapper in wrappers if wrapper.process_group.size() == dist.get_world_size()]
        reduced = {id(param) for wrapper in whole for param in _stepped(Replica(wrapper).parameters())}
        self._params = list(params) if not has_shards(params) and reduced.issuperset(map(id, params)) else []
        self._wrappers = [weakref.ref(wrapper) for wrapper in whole] if self._params else []

    def has_all(self, params: Sequence[Tensor]) -> bool:
        """Tell whether these are the parameters, in the same order, and the wrappers are still there."""
        if len(params) != len(self._params) or not all(map(operator.is_, params, self._params)):
            # Not to keep what was taken from the optimizer.
            self._params = []
            return False
        for wrapper in self._wrappers:
            if wrapper() is None:
                return False
        return bool(self._wrappers)
