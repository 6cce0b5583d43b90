"""A warning of losses on what a sigmoid in half precision made: their gradient is 0 where it rounds to 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoamp.core.casts import CastState
from autoamp.core.composites import ops_named
from autoamp.errors import warn_user
from autoamp.tensors import HALF_DTYPES, dtype_name
from autoamp.torch_private import dtype_of_node

TAKE_PROBABILITIES = ops_named("binary_cross_entropy")
"""The losses in question."""

# Nodes of the graph that pass the values of their first input on.
_PASSED_ON = frozenset(
    f"{name}Backward{number}"
    for name in (
        "Alias", "AsStrided", "Cat", "Clamp", "Clone", "Expand", "Index", "Permute", "ReshapeAlias", "Select", "Slice",
        "Squeeze", "Stack", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
    for number in range(3)
)  # fmt: skip
_MAX_NODES = 12


def watch_sigmoids(original: Any, casts: CastState, name: str, remedy: str) -> Callable[..., Any]:
    """Return what calls a loss, and warns once if a sigmoid in half precision made the fp32 values that it gets.

    Such values are the output of a model whose outputs are cast to fp32, or of ``sigmoid(x).float()``.

    Args:
        original: One of `TAKE_PROBABILITIES`.
        casts: The casts of the handle.
        name: Its dotted name.
        remedy: What the list tells the caller to do.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if name not in casts.warned and casts.is_open and casts.yielded_to is None:
            half = _dtype_of_sigmoid(args[0] if args else kwargs.get("input"))
            if half is not None:
                casts.warned.add(name)
                warn_user(f"{name} is unsafe after a sigmoid in {dtype_name(half)}: {remedy}")
        return original(*args, **kwargs)

    return call


def _dtype_of_sigmoid(value: Any) -> torch.dtype | None:
    """Return the half dtype of the sigmoid that made a tensor; None if none did, or none in half precision."""
    node = getattr(value, "grad_fn", None)
    for _ in range(_MAX_NODES):
        if node is None:
            return None
        kind = node.name()
        if kind == "SigmoidBackward0":
            dtype = dtype_of_node(node)
            return dtype if dtype in HALF_DTYPES else None
        if kind not in _PASSED_ON:
            return None
        node = node.next_functions[0][0]
    return None
