"""What a program's own source says of mixed precision: whether it sets amp up by a call of its own.

Looked at are the modules that are imported by now and are the program's: neither Python's, nor installed packages,
which as a rule only look whether there is an apex.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import tokenize
import types
from collections.abc import Iterator

__all__ = ["setup_call"]

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_HOMES = frozenset({"amp", "autoamp"})
_CALLS = frozenset({"initialize", "init"})


def setup_call() -> str | None:
    """Return the call by which the program sets mixed precision up, as its source has it; None where there is none."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_main = name in ("__main__", "__mp_main__")
        if file is None or (not is_main and _is_installed(file)):
            continue
        call = setup_call_of(_source(name, module, file))
        if call is not None:
            return call
    return None


def setup_call_of(source: str) -> str | None:
    """Return the call in a source by which it sets mixed precision up; None where there is none, or no such source."""
    if "apex" not in source and "autoamp" not in source:
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return next(_setup_calls(tree), None)


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


def _dotted(node: ast.expr) -> list[str]:
    """Return the names in ``a.b.c``, outermost last; of what is no plain name, those after it."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.insert(0, node.id)
    return parts


def _is_installed(file: str) -> bool:
    """Tell whether a file is Python's, ours, or an installed package's."""
    path = os.path.abspath(file)
    paths = sysconfig.get_paths()
    places = (_OURS, *(os.path.join(paths[name], "") for name in ("stdlib", "platstdlib")))
    return path.startswith(places) or not _INSTALLED.isdisjoint(path.split(os.sep))


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
