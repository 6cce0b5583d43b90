"""Exceptions, and warnings that point at the user's line.

Each exception here is an `AutoampError`, and also of the built-in kind that callers expect. What Python or torch raise
for such a call is raised as they do it: TypeError for an argument of a wrong kind to a decorator, ValueError where Apex
or torch raise that, ImportError and AttributeError for a name of Apex that is not provided.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

__all__ = [
    "AutoampError",
    "BannedFunctionError",
    "CheckpointError",
    "ListFileError",
    "LossScaleError",
    "NonFiniteGradientsError",
    "PatchError",
    "TargetError",
    "UsageError",
    "warn_user",
]


class AutoampError(Exception):
    """The base of autoamp's own exceptions. Plain TypeErrors and the like are raised where torch raises them."""


class ListFileError(AutoampError, ValueError):
    """A list file, or a list given as an argument, that cannot be used.

    Args:
        message: What is wrong, the rule and the remedy.
        path: The file (or a name such as ``lists=`` for a list that came from no file).
        line: The 1-based line of the offending entry, None where there is none.
    """

    def __init__(self, message: str, path: str, line: int | None = None) -> None:
        self.message = message
        self.path = path
        self.line = line
        super().__init__(f"{path}:{line}: {message}" if line is not None else f"{path}: {message}")

    def __reduce__(self) -> tuple[type[ListFileError], tuple[str, str, int | None]]:
        # For pickles, by which worker processes send errors to their parent: `args` has the whole message alone.
        return type(self), (self.message, self.path, self.line)


class PatchError(AutoampError, RuntimeError):
    """A target that is not there, or cannot be patched."""


class TargetError(AutoampError, ValueError):
    """A name that was registered and that nothing, or nothing that can be patched, stands under."""


class BannedFunctionError(AutoampError, NotImplementedError):
    """A banned function was called with half-precision arguments while ``allow_banned=False``."""


class UsageError(AutoampError, RuntimeError):
    """Calls in an order, or with arguments, that make no sense."""


class NonFiniteGradientsError(AutoampError, RuntimeError):
    """So many steps in a row overflowed that training is not going to recover.

    Args:
        message: What happened and what to do.
        overflow: What explains the last of the skips, where `init` was called with ``trace_overflow=True``.
    """

    def __init__(self, message: str, overflow: Any = None) -> None:
        self.overflow = overflow
        super().__init__(message)


class LossScaleError(AutoampError, ValueError):
    """A loss scale, or an argument of its rule, that cannot be used."""


class CheckpointError(AutoampError, ValueError):
    """A checkpoint that is incomplete, not autoamp's, or of a newer version. Nothing was loaded."""


def warn_user(message: str) -> None:
    """Warn with a `UserWarning` that points at the user's line.

    That is the innermost one outside of this package and of the packages that call it: modules and functions of torch
    do, and wrapt's hooks of imports.
    """
    # Imported here, since lists are read without torch, and this module has their errors.
    import torch

    # Compilers cannot trace a look at frames, so compiled code takes a fixed number.
    level = 3 if torch.compiler.is_compiling() else _level_of_user()
    warnings.warn(message, stacklevel=level)


def _level_of_user() -> int:
    """Return the ``stacklevel`` by which a warning of the calling function points at the user's line."""
    between = (__name__.partition(".")[0], "contextlib", "torch", "wrapt")
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in between:
        level, frame = level + 1, frame.f_back
    return level
