"""What a replacement bears: a mark that names its original, and the original's name and signature."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    while (found := mark_of(value)) is not None:
        value = found.original
    return value


def below_restored(value: Any) -> Any:
    """Return what is below the replacements whose sets were restored, at most down to one whose set was not."""
    while (found := mark_of(value)) is not None and not found.alive:
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
