"""Whether a model may be called a second time, and what is put back after that.

Random generators, tensors, numpy arrays, plain containers and numbers of modules are put back. Files, globals and other
objects are not, so a model whose code uses these is not called again.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dis
import functools
import logging
import pathlib
import random
import types
from collections.abc import Callable, Iterator
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
    property, classmethod, staticmethod, tuple,
)  # fmt: skip
# What these names do outside of the process, or to objects whose contents are not known, is not undone.
_WRITERS = frozenset(
    ("open", "print", "input", "exec", "eval", "globals", "setattr", "delattr", "write", "writelines", "write_text",
     "write_bytes", "put", "send", "sendall", "dump", "save", "savez", "tofile", "flush")
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
            functools.partial(torch.set_rng_state, torch.get_rng_state()),
            functools.partial(random.setstate, random.getstate()),
            functools.partial(numpy.random.set_state, numpy.random.get_state()),
        ]
        if torch.cuda.is_initialized():
            self._undo.append(functools.partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state()))

    def keep(self, module: Module) -> None:
        """Keep the attributes of a module and of those within it."""
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


def why_not_again(module: Module) -> str | None:
    """Return why calling a module once more is not safe; None if it is."""
    known: set[Any] = set()
    for part in module.modules():
        for name in _unsafe_in(part, known):
            why = "what a second call would write could not be undone"
            return f"{type(part).__name__} uses {name}, so that it is not called again: {why}"
    return None


def _unsafe_in(module: Module, known: set[Any]) -> Iterator[str]:
    """Yield what a call of a module uses that cannot be undone, but for calls of modules within it."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    # Those of torch normalize weights.
    if not all(_is_of_library(hook) for each in hooks for hook in each.values()):
        yield "hooks of the program"
    for function in _functions_of(type(module), "forward"):
        yield from _unsafe_names(function, module, known)


def _unsafe_names(function: types.FunctionType, module: Module | None, known: set[Any]) -> Iterator[str]:
    """Yield the names in a function, and in those of the program that it uses, whose use cannot be undone.

    Args:
        function: The function.
        module: The module whose method it is, if it is one.
        known: The functions that were looked at, with their modules.
    """
    if (function, module) in known or _is_of_library(function):
        return
    known.add((function, module))
    if any(map(_is_shared, (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))):
        yield f"a default of {function.__name__}"
    for code in _codes(function.__code__):
        steps = list(dis.get_instructions(code))
        stores = any(step.opname in ("STORE_ATTR", "DELETE_ATTR") for step in steps)
        for step in steps:
            name = str(step.argval)
            is_outer = step.opname.endswith("_GLOBAL") or name in function.__code__.co_freevars
            if name in _WRITERS or (is_outer and not step.opname.startswith("LOAD_")):
                yield name
            for value, is_own in _values_of(step, function, module):
                # The contents of modules are put back, and what an operator writes to a tensor.
                if not _is_safe(value) or (_is_shared(value) and not is_own):
                    yield name
                # It may store an attribute of the class.
                if stores and (value is type or (isinstance(value, type) and not _is_of_library(value))):
                    yield name
                if isinstance(value, Module):
                    for part in value.modules():
                        yield from _unsafe_in(part, known)
                for inner in _functions_of(value) if isinstance(value, type) else [value]:
                    if isinstance(inner, types.FunctionType):
                        yield from _unsafe_names(inner, module if "GLOBAL" not in step.opname else None, known)


def _values_of(
    step: dis.Instruction, function: types.FunctionType, module: Module | None
) -> Iterator[tuple[Any, bool]]:
    """Yield what an instruction may load by a name, with what that consists of, and whether it is the module's own."""
    name, is_own = step.argval, False
    values: list[Any] = []
    if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        values = [function.__globals__.get(name, getattr(builtins, name, None))]
    elif step.opname.startswith("LOAD_") and name in function.__code__.co_freevars:
        # Without contents there is nothing to write to.
        with contextlib.suppress(ValueError):
            values = [(function.__closure__ or ())[function.__code__.co_freevars.index(name)].cell_contents]
    elif step.opname.startswith("LOAD_") and step.opcode in dis.hasname and module is not None:
        is_own = name in vars(module)
        kinds = [vars(kind) for kind in type(module).__mro__]
        values = [vars(module)[name]] if is_own else [kind[name] for kind in kinds if name in kind]
    # They grow by what they consist of. The contents of a container within another one are not put back.
    for number, value in enumerate(values):
        yield value, is_own and number == 0
        if isinstance(value, (functools.partial, functools.cached_property)):
            values += [value.func, *getattr(value, "args", ()), *getattr(value, "keywords", {}).values()]
        elif isinstance(value, types.MethodType):
            values += [value.__self__, value.__func__]
        elif isinstance(value, (property, classmethod, staticmethod)):
            values.append(value.fget if isinstance(value, property) else value.__func__)
        elif isinstance(value, (tuple, *_CONTAINERS)):
            values.extend(value.values() if isinstance(value, dict) else value)


def _is_of_library(value: Any) -> bool:
    return (getattr(value, "__module__", None) or type(value).__module__).partition(".")[0] in _LIBRARIES


def _functions_of(kind: type, *names: str) -> Iterator[types.FunctionType]:
    """Yield functions of a class of the program, all if no names are given."""
    for base in kind.__mro__:
        for name, value in vars(base).items() if not _is_of_library(base) and base is not object else ():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, types.FunctionType) and (not names or name in names):
                yield function


def _is_shared(value: Any) -> bool:
    """Whether a value that belongs to no module can change."""
    return isinstance(value, (*_CONTAINERS, numpy.ndarray)) or hasattr(type(value), "__next__")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _is_safe(value: Any) -> bool:
    """Whether `KeptState` puts a value back, or nothing can be written to it but to what it consists of."""
    return isinstance(value, _SAFE) or type(value) in (*_CONTAINERS, *PLAIN_TYPES) or _is_of_library(value)
