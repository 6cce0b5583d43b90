"""Dotted names resolved without importing anything, and what to say of those that do not exist."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

import wrapt

from autoamp.core.patches import original_of
from autoamp.errors import PatchError


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
    path = getattr(module, "__path__", None)
    if (
        path is not None
        and parts[end] not in getattr(module, "__dict__", {})
        # `importlib.util.find_spec` would import the package, and so wait for another thread that imports it just now.
        and PathFinder.find_spec(f"{module.__name__}.{parts[end]}", path) is not None
    ):
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
        with contextlib.suppress(PatchError):
            if resolve(whole) is not None:
                return whole
    return None


def explain_missing(dotted: str, admits: Callable[[Any], bool] = lambda value: True) -> str:
    """Say which names come nearest to the first part of a dotted name that does not exist.

    Args:
        dotted: A name that `resolve` refuses: a part of it is imported.
        admits: Tells of a value whether the whole name may mean it.
    """
    parts = dotted.split(".")
    end = next(end for end in range(len(parts) - 1, 0, -1) if ".".join(parts[:end]) in sys.modules)
    holder: Any = sys.modules[".".join(parts[:end])]
    while end < len(parts) - 1 and hasattr(holder, parts[end]):
        holder, end = getattr(holder, parts[end]), end + 1
    path, rest = ".".join(parts[:end]), "".join(f".{part}" for part in parts[end + 1 :])
    names = [name for name in dir(holder) if rest or admits(getattr(holder, name, None))]
    near = [repr(f"{path}.{name}{rest}") for name in difflib.get_close_matches(parts[end], names, n=3)]
    return f"{path} has no {parts[end]!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
