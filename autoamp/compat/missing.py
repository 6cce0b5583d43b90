"""Names of Apex that are not provided: a loud error that says so and what to use in their place."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["REMEDIES", "missing_names", "remedy_for"]

# By the longest dotted name that matches; the last word on everything is the entry "apex".
REMEDIES = {
    "apex": "see the migration page, docs/migration.md, for what torch has in its place",
}


def remedy_for(name: str) -> str:
    """Return what to use in place of a dotted name of Apex."""
    while name not in REMEDIES and "." in name:
        name = name.rpartition(".")[0]
    return REMEDIES.get(name, REMEDIES["apex"])


def missing_names(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module of the tree.

    It raises AttributeError, so that ``hasattr`` and ``getattr`` with a default work, and ImportError where the name is
    wanted by ``from module import name``, which would hide the message of an AttributeError.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        message = f"{module}.{name} is not provided by autoamp's {module.partition('.')[0]}: "
        message += remedy_for(f"{module}.{name}")
        if not (name.startswith("__") and name.endswith("__")) and _importing(sys._getframe(1)):
            raise ImportError(message, name=module)
        raise AttributeError(message, name=name)

    return __getattr__


def _importing(frame: Any) -> bool:
    """Tell whether a frame is at a ``from ... import``."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return 0 <= at < len(code) and bool(dis.opname[code[at]] == "IMPORT_FROM")
