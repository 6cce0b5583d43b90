"""Attributes that are replaced, one by one or as a set, and put back exactly as they were.

A replacement bears a mark that names its original, and the original's name and signature. It is a plain function and
not a wrapt proxy: `torch.compile` takes a proxy over a builtin for the builtin, and drops what the proxy adds.

torch's compilers look functions up by identity, so they are taught which are replaced, and that Dynamo's graphs hold
all casts. By itself Dynamo traces the replacements of functions. Of a method, an operator, and a function of
`torch.nn.functional` that calls replaced ones it makes a node, which casts when it runs, if at all: a cached graph may
come from a process without casts, and code of a module in fp32 would be cast. No other casts are made where a graph
runs.

`listen` is for torch's global hooks: what is heard with or without an active handle.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import wrapt
from torch import Tensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoamp import torch_private
from autoamp.errors import PatchError
from autoamp.torch_private import (
    STRICT_EXPORT,
    attribute_in_dynamo,
    disabled_by_dynamo,
    dynamo_names,
    method_in_dynamo,
    partial_in_dynamo,
    traced_in_place_of,
)

log = logging.getLogger(__name__)

_ABSENT: Any = object()

writing = threading.RLock()
"""Held by the one thread that writes patches: they are written to objects that the whole process shares."""

_MARK = "__autoamp_original__"
_MARKED_TYPES = (types.FunctionType, staticmethod, classmethod)


@dataclass(slots=True)
class _Mark:
    """A note on a replacement.

    Attributes:
        original: What it replaces.
        bearer: The ``id`` of the replacement. On another function the mark is a copy, as `functools.wraps` makes it.
        alive: Whether it is in place, from `PatchSet.replace` until its set takes it back.
    """

    original: Any
    bearer: int
    alive: bool = False


def mark(replacement: Any, original: Any) -> Any:
    """Mark a function, staticmethod or classmethod as the replacement of ``original``, and return it."""
    setattr(replacement, _MARK, _Mark(original, id(replacement)))
    return replacement


def original_of(value: Any) -> Any:
    """Return what a replacement of ours replaces, below all replacements; anything else is returned as it is."""
    while type(value) in _MARKED_TYPES:
        found = vars(value).get(_MARK)
        if found is None or found.bearer != id(value):
            break
        value = found.original
    return value


def mark_of(value: Any) -> _Mark | None:
    """Return the mark of a replacement; None for anything else, such as a function that a mark was copied to."""
    found = vars(value).get(_MARK) if type(value) in _MARKED_TYPES else None
    return found if found is not None and found.bearer == id(value) else None


def imitate(
    replacement: Callable[..., Any], original: Any, module: str | None = None, qualname: str | None = None
) -> Any:
    """Give a replacement the original's name, docstring and signature, mark it with the original, and return it.

    Args:
        replacement: A function that is no other's replacement.
        original: What it replaces.
        module: The module by which a replacement of a builtin is pickled; by default the original's own. For an
            original that is written in Python it is always that.
        qualname: Its name in that module, by default the original's own.
    """
    functools.update_wrapper(replacement, original, assigned=("__doc__", "__name__"), updated=())
    if isinstance(original, types.FunctionType):
        module = qualname = None
    replacement.__module__ = original.__module__ if module is None else module
    replacement.__qualname__ = original.__qualname__ if qualname is None else qualname
    return mark(replacement, original)


def name_by(replacement: Any, module: str, qualname: str) -> None:
    """Let a replacement be pickled by ``module`` and ``qualname``, unless its present names lead to it already."""
    if isinstance(replacement, types.FunctionType):
        found: Any = sys.modules.get(replacement.__module__)
        for part in replacement.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not replacement:
            replacement.__module__, replacement.__qualname__ = module, qualname


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """A replacement for one attribute of one object, and what was there before.

    Attributes:
        parent: The module, class or object that is written to.
        attribute: The attribute's name.
        replacement: What is put there.
        previous: What ``vars(parent)`` has under that name once the patch is restored; a sentinel for nothing, where
            the attribute is inherited.
        rebinds: Whether it is a name of another module, by `PatchSet.rebind`.
        mark: The note on the replacement, if it bears one.
    """

    parent: Any
    attribute: str
    replacement: Any
    previous: Any
    rebinds: bool
    mark: _Mark | None

    @property
    def name(self) -> str:
        """The dotted name of the patched attribute."""
        return f"{getattr(self.parent, '__name__', type(self.parent).__name__)}.{self.attribute}"

    def restore(self) -> bool:
        """Put back what was there. Return False, and change nothing, where the attribute has another value by now."""
        found = vars(self.parent).get(self.attribute, _ABSENT)
        if found is not self.replacement:
            if self.previous is _ABSENT or disabled_by_dynamo(found) is not self.replacement:
                return False
            # The first call of torch.compile has disabled the replacement, as it would have disabled what was there.
            setattr(self.parent, self.attribute, torch.compiler.disable(self.previous))
        elif self.previous is _ABSENT:
            # Writing the inherited value would hide later changes of the attribute of the base class.
            delattr(self.parent, self.attribute)
        else:
            setattr(self.parent, self.attribute, self.previous)
        return True


def _inherited(parent: Any, attribute: str) -> Any:
    """Return what a parent inherits under a name, as it stands in the base class; a sentinel for nothing."""
    mro = parent.__mro__[1:] if isinstance(parent, type) else type(parent).__mro__
    return next((vars(base)[attribute] for base in mro if attribute in vars(base)), _ABSENT)


def _write(parent: Any, attribute: str, value: Any) -> Any:
    """Write an attribute, and return what the parent itself had there; a sentinel for nothing.

    Raises:
        PatchError: The parent has no attributes of its own, or this one cannot be written.
    """
    try:
        before = vars(parent).get(attribute, _ABSENT)
        setattr(parent, attribute, value)
    except (AttributeError, TypeError) as error:
        name = f"{getattr(parent, '__name__', type(parent).__name__)}.{attribute}"
        raise PatchError(f"{name} cannot be replaced: {error}") from error
    return before


def check_writable(parent: Any, attribute: str) -> None:
    """Raise PatchError where an attribute cannot be replaced: it is written with the value that it has already."""
    with writing:
        # Of a class the descriptor; of an object what its attribute is, which another thread may call meanwhile.
        find = inspect.getattr_static if isinstance(parent, type) else getattr
        if _write(parent, attribute, find(parent, attribute, None)) is _ABSENT:
            delattr(parent, attribute)


_waiting: dict[str, list[tuple[PatchSet, Callable[[types.ModuleType], None]]]] = {}
"""Who waits for the import of a module, by its name. wrapt cannot take a hook back, so a module has one at a time."""


def _call_back(module_name: str, module: types.ModuleType) -> None:
    """Call those who wait for a module, which was imported."""
    with writing:
        for _, callback in _waiting.pop(module_name, ()):
            callback(module)


class PatchSet:
    """Patches that are applied one after the other and restored together, in reverse order."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []

    def __iter__(self) -> Iterator[Patch]:
        return iter(self._patches)

    @property
    def late_bound(self) -> tuple[str, ...]:
        """The dotted names that `rebind` replaced."""
        return tuple(patch.name for patch in self._patches if patch.rebinds)

    def replace(self, parent: Any, attribute: str, replacement: Any, rebinds: bool = False) -> None:
        """Apply one patch and remember it. PatchError where the attribute cannot be written."""
        previous = found = _write(parent, attribute, replacement)
        if type(found) in _MARKED_TYPES:
            # What is below the replacements whose sets were restored.
            while (below := mark_of(previous)) is not None and not below.alive:
                previous = below.original
            # A replacement of a restored set, put back by somebody who had patched on top of it, may replace an
            # inherited attribute.
            if previous is not found and _inherited(parent, attribute) is previous:
                previous = _ABSENT
        own = mark_of(replacement)
        if own is not None:
            own.alive = True
        self._patches.append(Patch(parent, attribute, replacement, previous, rebinds, own))

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Let no other thread patch within the ``with`` statement, and take its patches back if it raises."""
        with writing:
            count = len(self._patches)
            try:
                yield
            except BaseException:
                self._take_back(count)
                raise

    def rebind(self, replacements: Mapping[int, tuple[Any, Any]], skip: Callable[[str], bool]) -> None:
        """Rebind names that other modules took by ``from ... import ...`` before the patches came.

        Args:
            replacements: ``id(original) -> (original, replacement)``.
            skip: Tells by a module's name whether that module is to be left alone.
        """
        for module, attribute, value in _module_globals(replacements, skip):
            self.replace(module, attribute, replacements[id(value)][1], rebinds=True)

    def restore(self) -> tuple[str, ...]:
        """Restore all patches in reverse order, and forget who waits for imports.

        Returns:
            The dotted names that somebody else patched after this set. They are left as they are, with our replacement
            below, which passes calls through once its handle is not active.
        """
        with writing:
            for module_name, waiting in _waiting.items():
                _waiting[module_name] = [one for one in waiting if one[0] is not self]
            replacements = {id(patch.replacement): patch.replacement for patch in self._patches}
            foreign = self._take_back(0)
            # Modules that were imported meanwhile may have taken replacements by `from ... import ...`.
            for module, attribute, value in _module_globals(replacements, lambda _: False):
                setattr(module, attribute, original_of(value))
        if foreign:
            log.warning("not restored, because another library patched them after autoamp: %s", ", ".join(foreign))
        return foreign

    def _take_back(self, count: int) -> tuple[str, ...]:
        """Restore all patches but the first ``count``; return the names that could not be."""
        taken: list[Patch] = []
        foreign = []
        while len(self._patches) > count:
            patch = self._patches.pop()
            taken.append(patch)
            if not patch.restore():
                foreign.append(patch.name)
        # One replacement may stand in several places, of which some stay.
        in_place = {id(patch.replacement) for patch in self._patches}
        for one in taken:
            if one.mark is not None and id(one.replacement) not in in_place:
                one.mark.alive = False
        return tuple(dict.fromkeys(foreign))

    def when_imported(self, module_name: str, callback: Callable[[types.ModuleType], None]) -> None:
        """Call ``callback(module)`` once ``module_name`` is imported, unless this set is restored before.

        A module that is imported already is not imported again, so for it nothing is called.
        """
        with writing:
            if module_name in sys.modules:
                return
            if module_name not in _waiting:
                wrapt.register_post_import_hook(functools.partial(_call_back, module_name), module_name)
            _waiting.setdefault(module_name, []).append((self, callback))


def _module_globals(wanted: Mapping[int, Any], skip: Callable[[str], bool]) -> list[tuple[types.ModuleType, str, Any]]:
    """Find the globals of imported modules that are among some objects.

    Args:
        wanted: The objects, by ``id(object)``.
        skip: Tells by a module's name whether that module is to be left out.

    Returns:
        For each its module, the name of the global and the object.
    """
    found: list[tuple[types.ModuleType, str, Any]] = []
    if not wanted:
        return found
    for name, module in list(sys.modules.items()):
        # Some programs keep other things than modules in sys.modules; their attributes may be computed.
        if not isinstance(module, types.ModuleType) or skip(name):
            continue
        names = vars(module).copy()
        # Most modules have none, and a large program has hundreds of thousands of globals: one set operation tells.
        if not wanted.keys().isdisjoint(map(id, names.values())):
            found += [(module, attribute, value) for attribute, value in names.items() if id(value) in wanted]
    return found


Hear = Callable[..., Any] | None


def listen(
    *,
    optimizer_called: Hear = None,
    optimizer_returned: Hear = None,
    module_called: Hear = None,
    module_returned: Hear = None,
    module_registered: Hear = None,
    around_load_optimizer: Hear = None,
) -> contextlib.ExitStack:
    """Call functions until the returned stack is closed: torch calls them in the order in which they were given.

    Args:
        optimizer_called: Called with an optimizer, ``args`` and ``kwargs`` as its own step begins; not at a skip.
        optimizer_returned: Called with the same at the end of that step, unless it raised.
        module_called: Called with a module and its inputs.
        module_returned: Called with a module, its inputs and its outputs, also if it raised.
        module_registered: Called with a module, a name and the module that it gets under that name.
        around_load_optimizer: Called with ``Optimizer.load_state_dict``; returns what is called in its place.
    """
    stack = contextlib.ExitStack()
    for hear, register in (
        (optimizer_called, register_optimizer_step_pre_hook),
        (optimizer_returned, register_optimizer_step_post_hook),
        (module_called, register_module_forward_pre_hook),
        (module_returned, lambda hear: register_module_forward_hook(hear, always_call=True)),
        (module_registered, register_module_module_registration_hook),
    ):
        if hear is not None:
            stack.callback(register(hear).remove)
    if around_load_optimizer is not None:
        patches, load = PatchSet(), Optimizer.load_state_dict
        patches.replace(Optimizer, "load_state_dict", imitate(around_load_optimizer(load), load))
        stack.callback(patches.restore)
    return stack


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a function that calls another."""


_ORIGINAL = "autoamp original "
"""What stands before the name of a method where traced code asks for torch's own."""

# What of Dynamo copies names of torch as it is imported. It knows ops by identity; and of a `Module.__call__` that it
# takes for torch's own it calls `forward` alone, which leaves casts by module out.
_TAKES_FROM_TORCH = ("torch._dynamo.utils", "torch._dynamo.variables.tensor", "torch._dynamo.variables.torch")


@dataclass
class ScriptTable:
    """What TorchScript knows of the replacements that are in place.

    Attributes:
        scripted: The ``id`` of those of builtins, which are in torch's table.
    """

    scripted: list[int] = field(default_factory=list)

    def add(self, original: Any, replacement: Any) -> None:
        """Let TorchScript compile the original in place of its replacement, a closure that it cannot compile."""
        find, table_of_builtins = torch_private.names_of_builtins
        name = find(original)
        if name is not None:
            table_of_builtins()[id(replacement)] = name
            self.scripted.append(id(replacement))
        elif isinstance(original, types.FunctionType):
            replacement.__prepare_scriptable__ = lambda: original
            if original in torch_private.two_in_one:
                torch_private.two_in_one[replacement] = torch_private.two_in_one[original]

    def forget(self) -> None:
        """Forget the replacements, and what torch and Dynamo looked up while torch was patched."""
        _, table_of_builtins = torch_private.names_of_builtins
        while self.scripted:
            table_of_builtins().pop(self.scripted.pop(), None)
        _clear_lookups()


def teach_dynamo(patches: PatchSet, casts_off: Wrap, casts_as_traced: Wrap) -> None:
    """Let Dynamo take the originals from torch's namespace, and all casts into its graphs, when it is imported.

    Args:
        patches: Take what is replaced for that.
        casts_off: Makes a function run with casts off in its thread.
        casts_as_traced: Makes a function run as the code casts that Dynamo traces now.
    """

    def load_originals(trace_rules: Any) -> None:
        load_object = trace_rules.load_object

        def load_original(name: str) -> Any:
            found = load_object(name)
            original = original_of(found)
            return None if found is original and _calls_replaced(found) else original

        patches.replace(trace_rules, "load_object", load_original)

    for module_name in _TAKES_FROM_TORCH:
        patches.when_imported(module_name, _put_originals)
    callbacks: dict[str, Callable[[Any], None]] = {
        "torch._dynamo.trace_rules": load_originals,
        "torch._dynamo.convert_frame": lambda _: _patch_dynamo(patches, casts_off, casts_as_traced),
        "torch.export._trace": lambda module: _patch_export(patches, casts_off, module),
    }
    for module_name, callback in callbacks.items():
        patches.when_imported(module_name, callback)
        if module_name in sys.modules:
            callback(sys.modules[module_name])
    _clear_lookups()


def _clear_lookups() -> None:
    """Let torch and Dynamo look up anew what they take functions for."""
    for module_name in ("torch.overrides", "torch._dynamo.trace_rules", "torch._dynamo.variables.torch"):
        for value in list(vars(sys.modules.get(module_name, types.ModuleType(""))).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def _put_originals(module: types.ModuleType) -> None:
    """Put the originals into the names and tables that a module has just made of patched names."""
    for name, value in list(vars(module).items()):
        restored: Any
        if type(value) is dict and not name.startswith("__"):
            restored = {original_of(key): original_of(item) for key, item in value.items()}
        elif type(value) is frozenset:
            restored = frozenset(map(original_of, value))
        else:
            restored = original_of(value)
        if restored is not value and restored != value:
            setattr(module, name, restored)


def traceable_method(function: Any) -> Any:
    """Return what calls a method of `Tensor` in traced code; anything but such a method is returned as it is."""
    if not getattr(function, "__qualname__", "").startswith(("Tensor.", "TensorBase.")):
        return function
    # The proxies of strict export look for `operator.div`, which there is not, where a node has the other name.
    name = _ORIGINAL + function.__name__.replace("__rdiv__", "__rtruediv__")

    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    return call


def _calls_replaced(function: Any) -> bool:
    """Whether a function of `torch.nn.functional` calls functions or methods that are replaced."""
    if not isinstance(function, types.FunctionType) or function.__module__ != "torch.nn.functional":
        return False
    owners = function.__globals__, vars(torch), vars(Tensor)
    found = (owner.get(name) for name in function.__code__.co_names for owner in owners)
    return any(one is not original_of(one) for one in found)


def _build_calls(find_attribute: Any, call_operator: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Build what finds an attribute of a tensor, and what calls an operator: of replaced methods, the replacements."""

    def find(self: Any, tx: Any, name: str) -> Any:
        if name.startswith(_ORIGINAL):
            return attribute_in_dynamo(self, name.removeprefix(_ORIGINAL))
        if _is_replaced(name):
            return partial_in_dynamo(method_in_dynamo(tx, name), self)
        return find_attribute(self, tx, name)

    def call(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        for place, name in enumerate(_methods_of(self.fn)):
            if place < len(args) and args[place].realize().is_tensor():
                if not _is_replaced(name):
                    # Python asks the second operand only where the first is no tensor.
                    break
                others = [*args[:place], *args[place + 1 :]]
                return method_in_dynamo(tx, name).call_function(tx, [args[place], *others], kwargs)
        return call_operator(self, tx, args, kwargs)

    return find, call


def _patch_dynamo(patches: PatchSet, casts_off: Wrap, casts_as_traced: Wrap) -> None:
    """Patch Dynamo, which is imported; arguments as for `teach_dynamo`."""
    _patch_loss(patches)
    names = dynamo_names()
    originals = [original_of(getattr(owner, name)) for owner, name in names]
    if not originals:
        return
    find_attribute, call_operator, run_node, call_backend, enter_region = originals
    run_off, compile_off = casts_off(run_node), casts_off(call_backend)

    def run(tracer: Any, node: Any, *args: Any) -> Any:
        # A node runs with fake tensors, for the dtype and shape of its result.
        target = node.target
        # A function that the program allows in graphs casts within, as it does in eager mode: einops has some.
        if isinstance(target, types.FunctionType) and not target.__module__.startswith(("torch.", "autoamp.")):
            node.target = casts_as_traced(target)
        return run_off(tracer, node, *args)

    def compile_graph(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        # The backend compiles, and what it returns runs, with casts off.
        compiled = compile_off(self, graph, *args, **kwargs)
        is_graph = getattr(compiled, "__self__", None) is graph
        if is_graph and hasattr(graph, "real_recompile"):
            # Dynamo does so itself with a graph that it is given, whose code is generated at the first call.
            graph.real_recompile()
            compiled = graph.forward
        return casts_off(compiled)

    def enter(self: Any, *args: Any) -> Any:
        # A region of torch.autocast without a dtype takes that in use where Dynamo traces it: the graph would make the
        # region anew as it runs, with casts off.
        device_type, dtype, *_ = self.target_values
        if dtype is None:
            self.target_values[1] = casts_as_traced(torch.autocast)(device_type, enabled=False).fast_dtype
        return enter_region(self, *args)

    replacements: tuple[Callable[..., Any], ...] = (
        *_build_calls(find_attribute, call_operator), run, compile_graph, enter,
    )  # fmt: skip
    for (owner, name), original, replacement in zip(names, originals, replacements, strict=True):
        patches.replace(owner, name, imitate(replacement, original))


def _patch_loss(patches: PatchSet) -> None:
    """Let Dynamo call the replacement of a loss whose module it does not make: it makes a node of torch's function."""
    owner, name = torch_private.loss_of_class()
    if owner is None:
        return
    original = original_of(getattr(owner, name))

    def call_loss(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return torch_private.loss_in_dynamo(tx, args, kwargs)

    patches.replace(owner, name, imitate(call_loss, original))


def _patch_export(patches: PatchSet, casts_off: Wrap, module: Any) -> None:
    """Patch the module of torch.export that makes a graph of ATen's operators of the one that Dynamo made."""
    if not hasattr(module, STRICT_EXPORT):
        return
    original = original_of(getattr(module, STRICT_EXPORT))

    def export(*args: Any, _to_aten_func: Any, **kwargs: Any) -> Any:
        return original(*args, _to_aten_func=casts_off(_to_aten_func), **kwargs)

    patches.replace(module, STRICT_EXPORT, imitate(export, original))


def _is_replaced(name: str) -> bool:
    return traced_in_place_of(inspect.getattr_static(Tensor, name, None)) is not None


def _methods_of(function: Any) -> tuple[str, ...]:
    """Return the names of the methods that Python calls for an operator: of the first operand, and of the second."""
    name = getattr(function, "__name__", "").strip("_")
    if function is not getattr(operator, name, None) and function is not pow:
        return ()
    if name.startswith("i") and not hasattr(Tensor, f"__{name}__"):
        name = name[1:]
    return f"__{name}__", f"__r{name}__"
