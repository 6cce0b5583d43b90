"""Dotted names resolved without importing anything, and callbacks for modules that are imported later."""

from __future__ import annotations

import difflib
import functools
import sys
import threading
import types
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

import wrapt

from autoamp.errors import PatchError
from autoamp.patching.marks import original_of

writing = threading.RLock()
"""Held by the one thread that writes patches: they are written to objects that the whole process shares."""


class _ImportWatcher:
    """Calls back when modules are imported. wrapt's hooks cannot be taken back, so a module has one at a time."""

    def __init__(self) -> None:
        self._armed: set[str] = set()
        self._listeners: dict[str, dict[object, list[Callable[[types.ModuleType], None]]]] = {}

    def listen(self, module_name: str, owner: object, callback: Callable[[types.ModuleType], None]) -> None:
        """Call ``callback(module)`` once a module is imported, unless ``owner`` is forgotten or it is there already."""
        with writing:
            if module_name in sys.modules:
                return
            self._listeners.setdefault(module_name, {}).setdefault(owner, []).append(callback)
            if module_name not in self._armed:
                self._armed.add(module_name)
                wrapt.register_post_import_hook(functools.partial(self._imported, module_name), module_name)

    def forget(self, owner: object) -> None:
        """Drop an owner's callbacks. The caller has `writing`."""
        for module_name, listeners in list(self._listeners.items()):
            listeners.pop(owner, None)
            if not listeners:
                del self._listeners[module_name]

    def _imported(self, module_name: str, module: types.ModuleType) -> None:
        with writing:
            self._armed.discard(module_name)
            for callbacks in self._listeners.pop(module_name, {}).values():
                for callback in callbacks:
                    callback(module)


watcher = _ImportWatcher()


def resolve(dotted: str) -> tuple[Any, str, Any] | None:
    """Find a dotted name among the modules that are imported already. Imports nothing.

    Returns:
        ``(parent, attribute, original)``, the last below any replacement of ours; None while the name's module is not
        imported.

    Raises:
        PatchError: The module is imported and has no such attribute.
    """
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:end]))
        if module is not None:
            break
    else:
        return None
    # A package that loads its submodules lazily would import one when it is asked for the attribute.
    if parts[end] not in getattr(module, "__dict__", {}) and _has_submodule(module, parts[end]):
        return None
    try:
        parent, attribute, original = wrapt.resolve_path(module, ".".join(parts[end:]))
    except AttributeError as error:
        raise PatchError(f"{dotted!r} does not exist: {error}") from error
    return parent, attribute, original_of(original)


def spelled_out(dotted: str) -> str | None:
    """Return torch's whole name for what programs shorten to ``nn.Linear`` or ``F.softmax``; None for any other name.

    Where the first part is a module that is there or can be imported, the name is no short one.
    """
    first, _, rest = dotted.partition(".")
    if not rest or first in sys.modules or PathFinder.find_spec(first) is not None:
        return None
    for whole in (f"torch.nn.functional.{rest}" if first == "F" else dotted, f"torch.{dotted}", f"torch.nn.{dotted}"):
        try:
            if resolve(whole) is not None:
                return whole
        except PatchError:
            pass
    return None


def explain_missing(dotted: str, admits: Callable[[Any], bool] = lambda value: True) -> str:
    """Say which names come nearest to the first part of a dotted name that does not exist.

    Args:
        dotted: A name that `resolve` refuses.
        admits: Tells of a value whether the whole name may mean it.
    """
    parts = dotted.split(".")
    end = next((end for end in range(len(parts) - 1, 0, -1) if ".".join(parts[:end]) in sys.modules), 0)
    if not end:
        return "no part of it is imported"
    holder: Any = sys.modules[".".join(parts[:end])]
    while end < len(parts) - 1 and hasattr(holder, parts[end]):
        holder, end = getattr(holder, parts[end]), end + 1
    path, rest = ".".join(parts[:end]), "".join(f".{part}" for part in parts[end + 1 :])
    names = [name for name in dir(holder) if rest or admits(getattr(holder, name, None))]
    near = [repr(f"{path}.{name}{rest}") for name in difflib.get_close_matches(parts[end], names, n=3)]
    return f"{path} has no {parts[end]!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def _has_submodule(module: Any, name: str) -> bool:
    """Whether a package has a submodule, without importing it.

    `importlib.util.find_spec` would import the package, and so wait for another thread that imports it just now.
    """
    path = getattr(module, "__path__", None)
    return path is not None and PathFinder.find_spec(f"{module.__name__}.{name}", path) is not None
