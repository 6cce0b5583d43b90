"""The exception family. Every error of this package is an `AutoampError`, and of the built-in kind a caller expects."""

from __future__ import annotations

__all__ = [
    "AutoampError",
    "BannedFunctionError",
    "CheckpointError",
    "ListFileError",
    "NonFiniteGradientsError",
    "PatchError",
    "UsageError",
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
        self.path = path
        self.line = line
        super().__init__(f"{path}:{line}: {message}" if line is not None else f"{path}: {message}")


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
