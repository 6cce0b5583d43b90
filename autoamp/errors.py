"""Exceptions, and warnings that point at the user's line.

Each exception here is an `AutoampError`, and also an instance of the built-in class that callers expect. Where Python,
torch or Apex raise a built-in exception for a call, autoamp raises the same one: TypeError for a wrong argument of a
decorator, ValueError where Apex or torch raise it, ImportError and AttributeError for a name of Apex that is missing.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

log = logging.getLogger(__name__)


class AutoampError(Exception):
    """Base class of autoamp's exceptions. Where torch raises a built-in exception, autoamp raises the same one."""


class ListFileError(AutoampError, ValueError):
    """A list file, or a list that was passed as an argument, is invalid.

    Args:
        message: What is wrong, the rule and the remedy.
        path: The file, or a name such as ``lists=`` for a list that is not a file.
        line: The 1-based line of the invalid entry; None if it has no line.
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
    """A target does not exist, or cannot be patched."""


class TargetError(AutoampError, ValueError):
    """A registered name does not exist, or its value cannot be patched."""


class BannedFunctionError(AutoampError, NotImplementedError):
    """A banned function was called with half-precision arguments while ``allow_banned=False``."""


class UsageError(AutoampError, RuntimeError):
    """A call has an invalid argument, or was made at the wrong time."""


class NonFiniteGradientsError(AutoampError, RuntimeError):
    """Too many steps in a row overflowed: training cannot recover.

    Args:
        message: What happened and what to do.
        overflow: The explanation of the last skip, if the overflow trace is on.
    """

    def __init__(self, message: str, overflow: Any = None) -> None:
        self.overflow = overflow
        super().__init__(message)


class LossScaleError(AutoampError, ValueError):
    """A loss scale, or an argument of a loss scaler, is invalid."""


class CheckpointError(AutoampError, ValueError):
    """A checkpoint is incomplete, not of autoamp, or of a newer version. Nothing was loaded."""


class TapeError(AutoampError, ValueError):
    """A file is not a tape, is damaged, or needs another version; or a tape cannot be saved."""


def warn_user(message: str) -> None:
    """Warn with a `UserWarning` that points at the user's line.

    That is the innermost one outside of this package and of the packages that call it: modules and functions of torch
    do, wrapt's hooks of imports, and deep copies. What the command itself warns of has no line, and is logged.
    """
    # Imported here, since lists are read without torch, and this module has their errors.
    import torch

    # Compilers cannot trace a look at frames, so compiled code takes a fixed number.
    level = 3 if torch.compiler.is_compiling() else _level_of_user()
    if level is None:
        log.warning(message)
    else:
        warnings.warn(message, stacklevel=level)


def line_of_user() -> str | None:
    """Return the user's line as ``"file:line"``, by the same rule as `warn_user`; None without one."""
    level = _level_of_user()
    frame = None if level is None else sys._getframe(level - 1)
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _level_of_user() -> int | None:
    """Return the ``stacklevel`` by which a warning of the calling function points at the user's line.

    None where the command warns before the program begins, or after its end: there is no such line.
    """
    between = (__name__.partition(".")[0], "contextlib", "copy", "torch", "wrapt")
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (name := frame.f_globals.get("__name__", "")).partition(".")[0] in between:
        if name == "autoamp.cli.command":
            return None
        level, frame = level + 1, frame.f_back
    return level


def kind_of(value: object) -> str:
    """Return how an error names what somebody gave: None, or its class with an article, such as "an int"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"
