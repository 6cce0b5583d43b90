"""`apex.pyprof`, which marked calls for NVIDIA's profilers. Here none are marked; programs that use it still run."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def init() -> None:
    """Log a warning that no call is marked, and what to use instead."""
    logger.warning(
        "apex.pyprof marks no calls here: nothing was done. Use torch.profiler.profile, or "
        "torch.autograd.profiler.emit_nvtx() for NVIDIA's profilers"
    )


def add_wrapper(mod: Any, fn_name: str) -> None:
    """Leave ``mod.fn_name``, a function of a module or class, as it is."""
