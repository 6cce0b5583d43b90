"""What is put back after the program's own code has run once more: random generators, and attributes of modules."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module

# Classes of a program's own may refuse to be cleared.
CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, set, list, collections.deque)
"""The containers that get their contents back."""


class KeptState:
    """Random generators, and the attributes of modules, as they were when each module was first kept.

    Buffers and numpy arrays get their values back, and parameters their memory. Lists, dicts, sets and generators that
    are attributes get their contents back, but not those of other objects.
    """

    def __init__(self) -> None:
        self._random = _random_states()
        self._modules: set[Module] = set()
        self._containers: list[tuple[Any, Any]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._arrays: list[tuple[numpy.ndarray[Any, Any], Any]] = []
        # Tensors that may be given another memory, as by ``param.data = other``.
        self._memories: list[tuple[Tensor, Tensor]] = []

    def keep(self, module: Module) -> None:
        """Keep the attributes of a module and of those within it."""
        for each in set(module.modules()) - self._modules:
            own = vars(each)
            values = [own, *own.values()]
            self._containers += [(value, value.copy()) for value in values if type(value) in CONTAINERS]
            self._generators += [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
            self._buffers += [(buffer, buffer.detach().clone()) for buffer in each.buffers(recurse=False)]
            self._arrays += [(value, value.copy()) for value in values if isinstance(value, numpy.ndarray)]
            held = (*each.parameters(recurse=False), *each.buffers(recurse=False))
            self._memories += [(tensor, tensor.data) for tensor in held]
            self._modules.add(each)

    def restore(self) -> None:
        """Put all back."""
        _set_random_states(self._random)
        for container, contents in self._containers:
            container.clear()
            add = getattr(container, "extend", None) or container.update
            add(contents)
        for generator, state in self._generators:
            generator.set_state(state)
        for array, contents in self._arrays:
            array[...] = contents
        for tensor, data in self._memories:
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
        for buffer, value in self._buffers:
            # Not counted as a write: a graph that is kept for another backward pass stays valid.
            buffer.data.copy_(value)


def _random_states() -> tuple[Any, ...]:
    """Return the states of the random generators of torch on the CPU and the current GPU, of Python and of numpy."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), gpu, random.getstate(), numpy.random.get_state()


def _set_random_states(states: tuple[Any, ...]) -> None:
    cpu, gpu, python, of_numpy = states
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
    random.setstate(python)
    numpy.random.set_state(of_numpy)
