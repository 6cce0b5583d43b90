"""The exception family. Every error of this package is an `AutoampError`, and of the built-in kind a caller expects."""

from __future__ import annotations

import sys
import warnings

__all__ = [
    "AutoampError",
    "BannedFunctionError",
    "CheckpointError",
    "ListFileError",
    "NonFiniteGradientsError",
    "PatchError",
    "UsageError",
    "warn_user",
]


class AutoampError(Exception):
    """The base of every exception that autoamp raises."""


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
        # Worker processes send errors to their parent as pickles, which are made anew from these arguments.
        return type(self), (self.message, self.path, self.line)


class PatchError(AutoampError, RuntimeError):
    """A target that cannot be patched."""


class BannedFunctionError(AutoampError, NotImplementedError):
    """A banned function was called with half-precision arguments while ``allow_banned=False``."""


class UsageError(AutoampError, RuntimeError):
    """Calls in an order, or with arguments, that cannot be right."""


class NonFiniteGradientsError(AutoampError, RuntimeError):
    """So many steps in a row overflowed that training is not going to recover."""


class CheckpointError(AutoampError, ValueError):
    """A checkpoint that is torn, foreign or too new. Nothing was loaded."""


def warn_user(message: str) -> None:
    """Warn, and point at the user's line: the innermost one outside of this package and of those that call it.

    Modules and functions of torch call ours, and so do wrapt's hooks of imports.
    """
    # How many frames lie between depends on who asks. A compiler cannot trace the question.
    import torch  # Lists are read without it, and raise errors of this module.

    level = 3 if torch.compiler.is_compiling() else _level_of_user()
    warnings.warn(message, stacklevel=level)


def _level_of_user() -> int:
    """Return the ``stacklevel`` by which a warning of the calling function points at the user's line."""
    between = (__name__.partition(".")[0], "contextlib", "torch", "wrapt")
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in between:
        level, frame = level + 1, frame.f_back
    return level
