"""What a program's own source says of mixed precision: whether it sets amp up by a call of its own.

Looked at are the modules that are imported by now and are the program's: neither Python's, nor installed packages,
which as a rule only look whether there is an apex.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import sysconfig
import tokenize
import types
from collections.abc import Iterator

from autoamp.modules import AUTOCAST

__all__ = ["Sources"]

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_HOMES = frozenset({"amp", "autoamp"})
_CALLS = frozenset({"initialize", "init"})
# What a region of torch.autocast is made by: the class, or one of those by device, which name none.
_REGION = "autocast"
_DEVICES = frozenset({"cpu", "cuda"})


class Sources:
    """The sources of a program's modules, each read once, as they are imported.

    Args:
        device_type: Regions of torch.autocast that are for another device alone do not count.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._imported = 0
        self._read: set[str] = set()

    def setup_call(self) -> str | None:
        """Return the call by which a module that was imported since sets mixed precision up; None where none does.

        As the source has it, such as ``"amp.initialize"``; ``"torch.autocast"`` for a region that may be enabled.
        """
        if len(sys.modules) == self._imported:
            return None
        self._imported = len(sys.modules)
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            is_main = name in ("__main__", "__mp_main__")
            if file is None or name in self._read:
                continue
            self._read.add(name)
            if is_main or not _is_installed(file):
                call = setup_call_of(_source(name, module, file), self._device_type)
                if call is not None:
                    return call
        return None


def setup_call_of(source: str, device_type: str) -> str | None:
    """Return the call in a source by which it sets mixed precision up; None where there is none, or no such source."""
    if not any(word in source for word in ("apex", "autoamp", _REGION)):
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return next(_setup_calls(tree), None) or (AUTOCAST if _has_region(tree, device_type) else None)


def _setup_calls(tree: ast.AST) -> Iterator[str]:
    """Yield the calls of ``amp.initialize``, ``autoamp.init`` and the like, and of what is imported under other names.

    A library's own ``amp`` that is none of apex's, such as ``torch.cuda.amp``, has neither function.
    """
    called_otherwise: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] in _HOMES:
            home = (node.module or "").rpartition(".")[2]
            for alias in node.names:
                if alias.name in _CALLS:
                    called_otherwise[alias.asname or alias.name] = f"{home}.{alias.name}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                home = alias.name.rpartition(".")[2]
                if alias.asname is not None and home in _HOMES:
                    called_otherwise.update({f"{alias.asname}.{name}": f"{home}.{name}" for name in _CALLS})
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            parts = _dotted(node.func)
            name = ".".join(parts)
            if name in called_otherwise:
                yield called_otherwise[name]
            elif len(parts) > 1 and parts[-1] in _CALLS and parts[-2] in _HOMES:
                yield ".".join(parts[-2:])


def _has_region(tree: ast.AST, device_type: str) -> bool:
    """Tell whether a source makes a region of torch.autocast, or a library's, that may be enabled on this device type.

    That is a call of what ends in ``autocast``: a statement's, a decorator's, a method's such as an accelerator's.
    """
    # The names of the class, and of what is imported that it may be in; each with the device that it is for, None for
    # any.
    classes: dict[str, str | None] = {_REGION: None}
    places: dict[str, str | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known = classes if alias.name == _REGION else places
                known[alias.asname or alias.name] = _device_in(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            places.update({alias.asname: _device_in(alias.name) for alias in node.names if alias.asname is not None})
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            parts = _dotted(node.func)
            if len(parts) == 1 and parts[0] in classes:
                device = classes[parts[0]]
            elif len(parts) > 1 and parts[-1] == _REGION:
                device = _device_in(".".join(parts)) or places.get(parts[0])
            else:
                continue
            if _may_be_enabled(node, device, device_type):
                return True
    return False


def _may_be_enabled(call: ast.Call, device: str | None, device_type: str) -> bool:
    """Tell whether a call makes a region that may be enabled on a device type; ``device`` is that of its class."""
    given = {word.arg: word.value for word in call.keywords}
    if device is None:
        # torch.autocast(device_type, dtype, enabled); those by device begin with enabled.
        found = given.get("device_type", call.args[0] if call.args else None)
        device = found.value if isinstance(found, ast.Constant) and isinstance(found.value, str) else None
    elif call.args and "enabled" not in given:
        given["enabled"] = call.args[0]
    enabled = given.get("enabled")
    switched_off = isinstance(enabled, ast.Constant) and enabled.value is False
    return not switched_off and (device is None or device.partition(":")[0] == device_type)


def _device_in(name: str) -> str | None:
    """Return the device that a dotted name such as ``torch.cuda.amp`` is about, None where it names none."""
    return next((part for part in name.split(".") if part in _DEVICES), None)


def _dotted(node: ast.expr) -> list[str]:
    """Return the names in ``a.b.c``, outermost last; of what is no plain name, those after it."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.insert(0, node.id)
    return parts


@functools.cache
def _not_the_users() -> tuple[str, ...]:
    """Return the folders of Python and of autoamp."""
    paths = sysconfig.get_paths()
    return (_OURS, *(os.path.join(paths[name], "") for name in ("stdlib", "platstdlib")))


def _is_installed(file: str) -> bool:
    """Tell whether a file is Python's, ours, or an installed package's."""
    path = os.path.abspath(file)
    return path.startswith(_not_the_users()) or not _INSTALLED.isdisjoint(path.split(os.sep))


def _source(name: str, module: types.ModuleType, file: str) -> str:
    """Return a module's source, empty where there is none."""
    try:
        with tokenize.open(file) as stream:
            return stream.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        pass
    # In an archive: its loader has it.
    spec = getattr(module, "__spec__", None)
    get_source = getattr(getattr(module, "__loader__", None), "get_source", None)
    try:
        return (get_source(name if spec is None else spec.name) if get_source is not None else None) or ""
    except (ImportError, OSError, UnicodeDecodeError):
        return ""
