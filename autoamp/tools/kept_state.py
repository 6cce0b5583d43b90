"""What is put back after the user asked for further calls of a model: `consistency()` and `explain_overflow()`.

Random generators, tensors, numpy arrays, plain containers and numbers of modules are put back. Files, globals and other
objects are not.
"""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module

# They get their contents back. Classes of a program's own may refuse to be cleared.
_CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, set, list, collections.deque)


class KeptState:
    """Random generators, and the attributes of modules, as they were when each module was first kept.

    The generators are those of torch on the CPU and the current GPU, of Python and of numpy.

    Buffers and numpy arrays get their values back, and parameters their memory. Lists, dicts, sets and generators that
    are attributes get their contents back, but not those of other objects.
    """

    def __init__(self) -> None:
        self._modules: set[Module] = set()
        self._undo: list[Callable[[], object]] = [
            functools.partial(torch.set_rng_state, torch.get_rng_state()),
            functools.partial(random.setstate, random.getstate()),
            functools.partial(numpy.random.set_state, numpy.random.get_state()),
        ]
        if torch.cuda.is_initialized():
            self._undo.append(functools.partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state()))

    def keep(self, module: Module) -> None:
        """Keep the attributes of a module and of those within it. Not from within compiled code."""
        if torch.compiler.is_compiling():
            return
        for each in set(module.modules()) - self._modules:
            own = vars(each)
            for value in (own, *own.values()):
                if type(value) in _CONTAINERS:
                    self._undo.append(functools.partial(_refill, value, value.copy()))
                elif isinstance(value, torch.Generator):
                    self._undo.append(functools.partial(value.set_state, value.get_state()))
                elif isinstance(value, numpy.ndarray):
                    self._undo.append(functools.partial(numpy.copyto, value, value.copy()))
            buffers = list(each.buffers(recurse=False))
            for tensor in (*each.parameters(recurse=False), *buffers):
                self._undo.append(functools.partial(_give_memory, tensor, tensor.data))
            for buffer in buffers:
                # Not counted as a write: a graph that is kept for another backward pass stays valid.
                self._undo.append(functools.partial(buffer.data.copy_, buffer.detach().clone()))
            self._modules.add(each)

    def restore(self) -> None:
        """Put all back."""
        for undo in self._undo:
            undo()


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    (getattr(container, "extend", None) or container.update)(contents)


def _give_memory(tensor: Tensor, data: Tensor) -> None:
    """Undo a ``tensor.data = other``."""
    if tensor.data_ptr() != data.data_ptr():
        tensor.data = data
