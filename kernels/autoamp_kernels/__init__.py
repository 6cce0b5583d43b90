"""Compiled kernels for `autoamp`: optimizer steps.

Importing this never fails for want of a library or a GPU: `backends` says what can run here, and why the rest cannot.
"""

from __future__ import annotations

from autoamp_kernels.library import ArgumentError, Backend, KernelError, backends
from autoamp_kernels.optimizers import adam_, lamb_, sgd_

__version__ = "0.2.0"

__all__ = ["ArgumentError", "Backend", "KernelError", "adam_", "backends", "lamb_", "sgd_"]
