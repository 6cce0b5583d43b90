"""A warning of buffers in half precision that a model writes as it trains: sums and counts in them stop growing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from autoamp.errors import warn_user
from autoamp.tensors import HALF_DTYPES, dtype_name, version_of
from autoamp.torch_private import MODULES_OF_NORMS

__all__ = ["BufferWrites"]


class BufferWrites:
    """Warns once of each half buffer that a call of a model in training writes, in place or by a new tensor.

    The calls 1, 2, 4, 8 and so on are looked at. torch's own modules are left out: norms have a warning of their own,
    and nothing adds up in other buffers of torch.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._told: set[str] = set()

    def begin(self, model: Module) -> Callable[[], None] | None:
        """Return what is to be called after this call of a model; None if this call is not looked at."""
        if not model.training:
            return None
        self._calls += 1
        if self._calls & (self._calls - 1):
            return None
        before = [
            (path, module, name, buffer, version_of(buffer))
            for path, module in model.named_modules()
            if module.training
            and not isinstance(module, MODULES_OF_NORMS)
            and not type(module).__module__.startswith("torch.")
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.dtype in HALF_DTYPES
        ]
        return lambda: self._end(model, before)

    def _end(self, model: Module, before: list[Any]) -> None:
        """Warn of the half buffers that were written since."""
        written = {
            f"{path}.{name}".removeprefix("."): (path, buffer.dtype)
            for path, module, name, buffer, version in before
            if module._buffers.get(name) is not buffer or version_of(buffer) != version
        }
        new = [name for name in written if name not in self._told]
        if not new:
            return
        self._told.update(new)
        dtype = written[new[0]][1]
        most = round(2 / torch.finfo(dtype).eps)
        parts = {written[name][0]: "fp32" for name in new}
        remedies = ["register it as an integer or torch.float64 tensor, or one without dimensions, which are not cast"]
        if not parts.pop("", None):
            remedies.clear()
        if parts:
            remedies.append(f'keep the module in fp32 by initialize(..., lists={{"modules": {parts}}})')
        warn_user(
            f"{type(model).__name__} writes buffers in {dtype_name(dtype)}, where {most} + 1 is {most}: a sum or count "
            f"in {', '.join(new)} stops growing; {'; '.join(remedies)}"
        )
