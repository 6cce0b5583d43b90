"""Whether a model may be called a second time, and what is put back after that.

Random generators, tensors, numpy arrays, plain containers and numbers of modules are put back. Files, globals and other
objects are not, so a model whose code uses these is not called again.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dis
import logging
import pathlib
import random
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module

from autoamp.tensors import PLAIN_TYPES

_LIBRARIES = frozenset(
    ("torch", "autoamp", "numpy", "math", "einops", "functools", "itertools", "typing", "collections")
)
_SAFE = (
    Tensor, Module, torch.Generator, torch.memory_format, numpy.ndarray, numpy.generic, pathlib.PurePath,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, logging.Logger,
)  # fmt: skip
# What these names do outside of the process, or to objects whose contents are not known, is not undone.
_WRITERS = frozenset(
    ("open", "print", "input", "exec", "eval", "setattr", "delattr", "write", "writelines", "write_text", "write_bytes",
     "put", "send", "sendall", "dump", "save", "savez", "tofile", "flush")
)  # fmt: skip
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
            partial(torch.set_rng_state, torch.get_rng_state()),
            partial(random.setstate, random.getstate()),
            partial(numpy.random.set_state, numpy.random.get_state()),
        ]
        if torch.cuda.is_initialized():
            self._undo.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state()))

    def keep(self, module: Module) -> None:
        """Keep the attributes of a module and of those within it."""
        for each in set(module.modules()) - self._modules:
            own = vars(each)
            for value in (own, *own.values()):
                if type(value) in _CONTAINERS:
                    self._undo.append(partial(_refill, value, value.copy()))
                elif isinstance(value, torch.Generator):
                    self._undo.append(partial(value.set_state, value.get_state()))
                elif isinstance(value, numpy.ndarray):
                    self._undo.append(partial(numpy.copyto, value, value.copy()))
            buffers = list(each.buffers(recurse=False))
            for tensor in (*each.parameters(recurse=False), *buffers):
                self._undo.append(partial(_give_memory, tensor, tensor.data))
            for buffer in buffers:
                # Not counted as a write: a graph that is kept for another backward pass stays valid.
                self._undo.append(partial(_write_data, buffer, buffer.detach().clone()))
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


def _write_data(tensor: Tensor, values: Tensor) -> None:
    tensor.data.copy_(values)


def why_not_again(module: Module) -> str | None:
    """Return why calling a module once more is not safe; None if it is."""
    for part in module.modules():
        hooks = (part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks)
        for hook in (hook for each in hooks for hook in each.values()):
            # Those of torch normalize weights.
            if not _is_of_library(hook):
                return f"{type(part).__name__} has hooks of the program, which would run again"
    known: set[types.CodeType] = set()
    for part in module.modules():
        if not _is_of_library(type(part)):
            for function in _functions_of(type(part), "forward"):
                if name := _unsafe_name(function, part, known):
                    return (
                        f"{type(part).__name__} uses {name}, so that it is not called again: what a second call "
                        "would write could not be undone"
                    )
    return None


def _is_of_library(value: Any) -> bool:
    return (getattr(value, "__module__", None) or type(value).__module__).partition(".")[0] in _LIBRARIES


def _functions_of(kind: type, *names: str) -> Iterator[types.FunctionType]:
    """Yield functions of a class of the program, all if no names are given."""
    for base in kind.__mro__:
        for name, value in vars(base).items() if not _is_of_library(base) and base is not object else ():
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType) and (not names or name in names):
                yield function


def _unsafe_name(function: types.FunctionType, module: Module | None, known: set[types.CodeType]) -> str | None:
    """Return the first name in a function, and in those of the program that it uses, whose use cannot be undone."""
    if function.__code__ in known:
        return None
    known.add(function.__code__)
    outer = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # Without contents there is nothing to write to.
        with contextlib.suppress(ValueError):
            outer[name] = cell.cell_contents
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if _is_shared(value):
            return f"a default of {function.__name__}"
    for code in _codes(function.__code__):
        steps = list(dis.get_instructions(code))
        stores = any(step.opname in ("STORE_ATTR", "DELETE_ATTR") for step in steps)
        for step in steps:
            name, value = str(step.argval), None
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or name in _WRITERS:
                return name
            is_outer = True
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = function.__globals__.get(name, getattr(builtins, name, None))
            elif step.opname == "LOAD_DEREF":
                value = outer.get(name)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and module is not None:
                is_outer = name not in vars(module)
                value = vars(module).get(name, getattr(type(module), name, None))
            # The contents of modules are put back, and what an operator writes to a tensor.
            if not _is_safe(value) or (is_outer and _is_shared(value)):
                return name
            # It may store an attribute of the class.
            if stores and (value is type or (isinstance(value, type) and not _is_of_library(value))):
                return name
            used = [value] if isinstance(value, types.FunctionType) else []
            used += _functions_of(value) if isinstance(value, type) else []
            for inner in used:
                owner = module if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
                if not _is_of_library(inner) and (found := _unsafe_name(inner, owner, known)):
                    return found
    return None


def _is_shared(value: Any) -> bool:
    """Whether a value that belongs to no module can change."""
    return isinstance(value, (*_CONTAINERS, numpy.ndarray)) or hasattr(type(value), "__next__")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _is_safe(value: Any) -> bool:
    """Whether `KeptState` puts a value back, or nothing can be written to it."""
    if isinstance(value, (*_SAFE, property, classmethod, staticmethod)) or type(value) in PLAIN_TYPES:
        return True
    if type(value) in _CONTAINERS or isinstance(value, tuple):
        items = value.values() if isinstance(value, dict) else value
        return all(type(item) in PLAIN_TYPES or isinstance(item, _SAFE) for item in items)
    return _is_of_library(value)
