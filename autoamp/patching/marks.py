"""Replacements know what they stand for: a mark on each, and the original's name and signature."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["SHORTCUT", "below_restored", "imitate", "mark", "mark_of", "name_by", "offer_shortcut", "original_of"]


_MARK = "__autoamp_original__"
SHORTCUT = "__autoamp_shortcut__"
_MARKED_TYPES = (types.FunctionType, staticmethod, classmethod)


@dataclass(slots=True)
class _Mark:
    """What a replacement stands for, and whether its patch set still stands.

    It names its bearer, since `functools.wraps` copies a function's attributes.
    """

    original: Any
    bearer: int
    alive: bool = False


def mark(replacement: Any, original: Any) -> Any:
    """Let `original_of` know what a function, staticmethod or classmethod stands for, and return it."""
    setattr(replacement, _MARK, _Mark(original, id(replacement)))
    return replacement


def original_of(value: Any) -> Any:
    """Return what a replacement of ours stands for, and anything else as it is."""
    while (found := mark_of(value)) is not None:
        value = found.original
    return value


def below_restored(value: Any) -> Any:
    """Return what is below the replacements of sets that were restored."""
    while (found := mark_of(value)) is not None and not found.alive:
        value = found.original
    return value


def mark_of(value: Any) -> _Mark | None:
    """Return the mark of a replacement; None for anything else, and for a copy that took a mark along."""
    found = vars(value).get(_MARK) if type(value) in _MARKED_TYPES else None
    return found if found is not None and found.bearer == id(value) else None


def imitate(
    replacement: Callable[..., Any], original: Any, module: str | None = None, qualname: str | None = None
) -> Any:
    """Give a replacement the original's name, docstring and signature, and remember the original.

    Args:
        replacement: A function made for this one purpose.
        original: What it stands for.
        module: The module by which a replacement of a builtin is to be pickled while it is in place; by default the
            original's own, as it always is for a function written in Python.
        qualname: Its name in that module, by default the original's own.
    """
    functools.update_wrapper(replacement, original, assigned=("__doc__", "__name__"), updated=())
    if isinstance(original, types.FunctionType):
        module = qualname = None
    replacement.__module__ = original.__module__ if module is None else module
    replacement.__qualname__ = original.__qualname__ if qualname is None else qualname
    return mark(replacement, original)


def name_by(replacement: Any, module: str, qualname: str) -> None:
    """Let a replacement be pickled by a place where it stands, unless it stands where its original was defined."""
    if isinstance(replacement, types.FunctionType):
        found: Any = sys.modules.get(replacement.__module__)
        for part in replacement.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not replacement:
            replacement.__module__, replacement.__qualname__ = module, qualname


def offer_shortcut(replacement: Callable[..., Any], shortcut: Callable[..., Any]) -> None:
    """Let those who know their arguments call something else in place of a replacement, for as long as that stands."""
    setattr(replacement, SHORTCUT, (replacement, shortcut))
