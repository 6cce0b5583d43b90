"""Torch's compilers look functions up by identity. Here TorchScript and Dynamo learn which functions are replaced."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from autoamp import torch_private
from autoamp.patching.dynamo import Wrap, calls_replaced, patch_dynamo, patch_export
from autoamp.patching.marks import original_of
from autoamp.patching.patches import PatchSet

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
            casts_off: As `patch_dynamo` takes it.
            casts_as_traced: As `patch_dynamo` takes it.
        """

        def load_originals(trace_rules: Any) -> None:
            load_object = trace_rules.load_object

            def load_original(name: str) -> Any:
                found = load_object(name)
                original = original_of(found)
                return None if found is original and calls_replaced(found) else original

            patches.replace(trace_rules, "load_object", load_original)

        for module_name in _TAKES_FROM_TORCH:
            patches.when_imported(module_name, _put_originals)
        callbacks: dict[str, Callable[[Any], None]] = {
            "torch._dynamo.trace_rules": load_originals,
            "torch._dynamo.convert_frame": lambda _: patch_dynamo(patches, casts_off, casts_as_traced),
            "torch.export._trace": lambda module: patch_export(patches, casts_off, module),
        }
        for module_name, callback in callbacks.items():
            if module_name in sys.modules:
                callback(sys.modules[module_name])
            else:
                patches.when_imported(module_name, callback)
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
