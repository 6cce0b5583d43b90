"""A warning of buffers in half precision that a model writes as it trains: sums and counts in them stop growing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.errors import warn_user
from autoamp.tensors import HALF_DTYPES, dtype_name, version_of
from autoamp.torch_private import MODULES_OF_NORMS


class BufferWrites:
    """Warns once of each half buffer in which calls of a model in training add up: a count, a sum or an average.

    The calls 1, 2, 4, 8 and so on are looked at. A buffer that one of them writes, in place or by a new tensor, is
    compared with its values of before at the next one: what is overwritten, as a mask is, changes as a whole or not at
    all. torch's own modules are left out: norms have a warning of their own, and nothing adds up in other buffers of
    torch.

    Args:
        losses: Gets a row of plain values for each warning, as `autoamp.tools.HalfLosses` has them.
    """

    def __init__(self, losses: list[dict[str, Any]]) -> None:
        self._losses = losses
        self._calls = 0
        # By the path of the module and the name of the buffer.
        self._written: set[tuple[str, str]] = set()
        self._told: set[tuple[str, str]] = set()

    def begin(self, model: Module) -> Callable[[], None] | None:
        """Return what is to be called after this call of a model; None if this call is not looked at."""
        if not model.training:
            return None
        self._calls += 1
        if self._calls & (self._calls - 1):
            return None
        before = [
            (path, module, name, buffer, version_of(buffer), buffer.clone() if (path, name) in self._written else None)
            for path, module in model.named_modules()
            if module.training
            and not isinstance(module, MODULES_OF_NORMS)
            and not type(module).__module__.startswith("torch.")
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.dtype in HALF_DTYPES and (path, name) not in self._told
        ]
        return lambda: self._end(model, before)

    def _end(self, model: Module, before: list[Any]) -> None:
        """Warn of the half buffers in which values were added up since."""
        new: list[tuple[str, str]] = []
        for path, module, name, buffer, version, value in before:
            now = module._buffers.get(name)
            if now is not buffer or version_of(buffer) != version:
                self._written.add((path, name))
                if value is not None and now is not None and _adds_up(value, now):
                    new.append((path, name))
                    dtype = buffer.dtype
        if not new:
            return
        self._told.update(new)
        most = round(2 / torch.finfo(dtype).eps)
        parts = {path: "fp32" for path, _ in new}
        remedies = ["Register it as an integer or torch.float64 tensor, or one without dimensions, which are not cast"]
        if not parts.pop("", None):
            remedies.clear()
        if parts:
            remedies.append(f'Keep the module in fp32 by initialize(..., lists={{"modules": {parts}}})')
        names = [f"{path}.{name}".removeprefix(".") for path, name in new]
        sentence = (
            f"{type(model).__name__} writes buffers in {dtype_name(dtype)}, where {most} + 1 is {most}: a sum or count "
            f"in {', '.join(names)} stops growing"
        )
        remedy = ". ".join(remedies)
        self._losses.append({
            "kind": "buffer counts", "step": None, "optimizer": None, "group": None, "sentence": sentence,
            "remedy": remedy,
        })  # fmt: skip
        warn_user(f"{sentence}. {remedy}")


@torch.no_grad()
def _adds_up(before: Tensor, now: Tensor) -> bool:
    """Whether a value seems to be made of the one before: few of its size changed, or a large sum stays. Waits for it.

    Masks and noise change in some element by as much as the largest is.
    """
    if before.shape != now.shape or not before.numel():
        return False
    size, change = before.float().abs().amax(), (now.float() - before.float()).abs().amax()
    stands_still = (change == 0) & (before.amax() >= 2 / torch.finfo(before.dtype).eps)
    return bool(((change > 0) & (change <= size / 2)) | stands_still)
