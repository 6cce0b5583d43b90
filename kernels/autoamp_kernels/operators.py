"""The kernels as operators of torch, in the namespace ``autoamp_kernels``, so that `torch.compile` goes around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["define"]

# Operators last as long as this object.
_LIBRARY = torch.library.Library("autoamp_kernels", "DEF")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    """Define an operator that runs ``function`` on a CPU and on CUDA.

    Args:
        schema: Its schema, in torch's notation.
        function: Takes what the schema says, and returns None where the operator only writes in place.
        fake: Makes what is returned, without values, for tensors that have none; None where nothing is returned.

    Returns:
        The operator.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CPU")
    _LIBRARY.impl(name, function, "CUDA")
    _LIBRARY.impl(name, fake or _nothing, "Meta")
    return getattr(torch.ops.autoamp_kernels, name).default


def _nothing(*args: Any) -> None:
    """Stand for an operator that only writes, where there are no values to write."""
