"""What torch's compilers are taught: which functions are replaced, and that Dynamo's graphs hold all casts.

They look functions up by identity. By itself Dynamo traces the replacements of functions. Of a method, an operator, and
a function of `torch.nn.functional` that calls replaced ones it makes a node, which casts when it runs, if at all: a
cached graph may come from a process without casts, and code of a module in fp32 would be cast. No other casts are made
where a graph runs.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoamp import torch_private
from autoamp.core.patches import PatchSet, imitate, original_of
from autoamp.torch_private import (
    STRICT_EXPORT,
    attribute_in_dynamo,
    dynamo_names,
    method_in_dynamo,
    partial_in_dynamo,
    traced_in_place_of,
)

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a function that calls another."""


_ORIGINAL = "autoamp original "
"""What stands before the name of a method where traced code asks for torch's own."""

# What of Dynamo copies names of torch as it is imported. It knows ops by identity; and of a `Module.__call__` that it
# takes for torch's own it calls `forward` alone, which leaves casts by module out.
_TAKES_FROM_TORCH = ("torch._dynamo.utils", "torch._dynamo.variables.tensor", "torch._dynamo.variables.torch")


class CompilerTables:
    """What the compilers know of the replacements that are in place."""

    def __init__(self) -> None:
        self._scripted: list[int] = []

    def add(self, original: Any, replacement: Any) -> None:
        """Let TorchScript compile the original in place of its replacement, a closure that it cannot compile."""
        find, table_of_builtins = torch_private.names_of_builtins
        name = find(original)
        if name is not None:
            table_of_builtins()[id(replacement)] = name
            self._scripted.append(id(replacement))
        elif isinstance(original, types.FunctionType):
            replacement.__prepare_scriptable__ = lambda: original
            if original in torch_private.two_in_one:
                torch_private.two_in_one[replacement] = torch_private.two_in_one[original]

    def teach_dynamo(self, patches: PatchSet, casts_off: Wrap, casts_as_traced: Wrap) -> None:
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

    def forget(self) -> None:
        """Forget the replacements, and what torch and Dynamo looked up while torch was patched."""
        _, table_of_builtins = torch_private.names_of_builtins
        while self._scripted:
            table_of_builtins().pop(self._scripted.pop(), None)
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


def _patch_dynamo(patches: PatchSet, casts_off: Wrap, casts_as_traced: Wrap) -> None:
    """Patch Dynamo, which is imported; arguments as for `CompilerTables.teach_dynamo`."""
    builders = _build_attribute, _build_operator, _build_node, _build_compilation, _build_region
    for (owner, name), build in zip(dynamo_names(), builders, strict=False):
        patches.replace(owner, name, build(original_of(getattr(owner, name)), casts_off, casts_as_traced))


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


def _build_attribute(original: Any, casts_off: Wrap, casts_as_traced: Wrap) -> Any:
    """Build what finds the attribute of a tensor: of a method that is replaced, its replacement."""

    def find(self: Any, tx: Any, name: str) -> Any:
        if name.startswith(_ORIGINAL):
            return attribute_in_dynamo(self, name.removeprefix(_ORIGINAL))
        return partial_in_dynamo(method_in_dynamo(tx, name), self) if _is_replaced(name) else original(self, tx, name)

    return imitate(find, original)


def _build_operator(original: Any, casts_off: Wrap, casts_as_traced: Wrap) -> Any:
    """Build what calls an operator: where its method is replaced, the replacement."""

    def call(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        for place, name in enumerate(_methods_of(self.fn)):
            if place < len(args) and args[place].realize().is_tensor():
                if not _is_replaced(name):
                    # Python asks the second operand only where the first is no tensor.
                    break
                others = [*args[:place], *args[place + 1 :]]
                return method_in_dynamo(tx, name).call_function(tx, [args[place], *others], kwargs)
        return original(self, tx, args, kwargs)

    return imitate(call, original)


def _methods_of(function: Any) -> tuple[str, ...]:
    """Return the names of the methods that Python calls for an operator: of the first operand, and of the second."""
    name = getattr(function, "__name__", "").strip("_")
    if function is not getattr(operator, name, None) and function is not pow:
        return ()
    if name.startswith("i") and not hasattr(Tensor, f"__{name}__"):
        name = name[1:]
    return f"__{name}__", f"__r{name}__"


def _build_node(original: Any, casts_off: Wrap, casts_as_traced: Wrap) -> Any:
    """Build what runs a node with fake tensors, for the dtype and shape of its result."""
    run_off = casts_off(original)

    def run(tracer: Any, node: Any, *args: Any) -> Any:
        target = node.target
        # A function that the program allows in graphs casts within, as it does in eager mode: einops has some.
        if isinstance(target, types.FunctionType) and not target.__module__.startswith(("torch.", "autoamp.")):
            node.target = casts_as_traced(target)
        return run_off(tracer, node, *args)

    return imitate(run, original)


def _build_compilation(original: Any, casts_off: Wrap, casts_as_traced: Wrap) -> Any:
    """Build what calls the backend: it compiles, and what it returns runs, with casts off."""
    compile_off = casts_off(original)

    def compile_graph(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = compile_off(self, graph, *args, **kwargs)
        is_graph = getattr(compiled, "__self__", None) is graph
        if is_graph and hasattr(graph, "real_recompile"):
            # Dynamo does so itself with a graph that it is given, whose code is generated at the first call.
            graph.real_recompile()
            compiled = graph.forward
        return casts_off(compiled)

    return imitate(compile_graph, original)


def _build_region(original: Any, casts_off: Wrap, casts_as_traced: Wrap) -> Any:
    """Build what enters a region of torch.autocast: one without a dtype takes that in use where Dynamo traces it.

    The graph would make the region anew as it runs, with casts off.
    """

    def enter(self: Any, *args: Any) -> Any:
        device_type, dtype, *_ = self.target_values
        if dtype is None:
            self.target_values[1] = casts_as_traced(torch.autocast)(device_type, enabled=False).fast_dtype
        return original(self, *args)

    return imitate(enter, original)
