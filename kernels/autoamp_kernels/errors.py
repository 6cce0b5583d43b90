"""The exceptions of the package."""

from __future__ import annotations

__all__ = ["ArgumentError", "KernelError"]


class KernelError(RuntimeError):
    """A kernel could not run: its door is closed, or the library or the device refused the call."""


class ArgumentError(ValueError):
    """Tensors that a kernel cannot take. Nothing was launched and nothing was written."""
