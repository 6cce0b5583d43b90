"""Buffers of half models in which values add up: a count in half precision stops growing, and an average rounds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core import CastModels, Listener, version_of
from autoamp.errors import warn_user
from autoamp.tensors import HALF_DTYPES, dtype_name
from autoamp.tools.half_losses import HalfLosses
from autoamp.torch_private import MODULES_OF_NORMS


class BufferWrites(Listener):
    """Warns once of each half buffer in which calls of a model in training add up: a count, a sum or an average.

    The calls 1, 2, 4, 8 and so on of each model are looked at. A buffer that one of them writes, in place or by a new
    tensor, is compared with its values of before at the next one: what is overwritten, as a mask is, changes as a whole
    or not at all. torch's own modules are left out: norms have a warning of their own, and nothing adds up in other
    buffers of torch. Compiled code is not watched.

    Args:
        models: Those that are looked at where they are in half precision.
        losses: Gets a row for each warning.
    """

    def __init__(self, models: CastModels, losses: HalfLosses) -> None:
        self._models, self._losses = models, losses
        self._calls: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()
        # By the module the names of its buffers.
        self._written: weakref.WeakKeyDictionary[Module, set[str]] = weakref.WeakKeyDictionary()
        self._told: weakref.WeakKeyDictionary[Module, set[str]] = weakref.WeakKeyDictionary()

    def call_begun(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Any], object] | None:
        """Look at this call of a half model; see `Listener.call_begun`."""
        boundary = self._models.boundaries.get(module)
        if boundary is None or boundary.inputs not in HALF_DTYPES or not module.training:
            return None
        calls = self._calls[module] = self._calls.get(module, 0) + 1
        if calls & (calls - 1):
            return None
        before = [
            (path, part, name, buffer, version_of(buffer), buffer.clone() if name in written else None)
            for path, part in module.named_modules()
            if part.training
            and not isinstance(part, MODULES_OF_NORMS)
            and not type(part).__module__.startswith("torch.")
            for written, told in [(self._written.setdefault(part, set()), self._told.setdefault(part, set()))]
            for name, buffer in part._buffers.items()
            if buffer is not None and buffer.dtype in HALF_DTYPES and name not in told
        ]
        return lambda outputs: self._call_ended(module, before)

    def _call_ended(self, model: Module, before: list[Any]) -> None:
        """Warn of the half buffers in which values were added up since."""
        new: list[tuple[str, str]] = []
        for path, part, name, buffer, version, value in before:
            now = part._buffers.get(name)
            if now is not buffer or version_of(buffer) != version:
                self._written[part].add(name)
                # A half model within this one may have told of it.
                if value is not None and now is not None and name not in self._told[part] and _adds_up(value, now):
                    self._told[part].add(name)
                    new.append((path, name))
                    dtype = buffer.dtype
        if not new:
            return
        most = round(2 / torch.finfo(dtype).eps)
        parts = {path: "fp32" for path, _ in new}
        remedies = ["Register it as an integer or torch.float64 tensor, or one without dimensions, which are not cast"]
        if not parts.pop("", None):
            remedies.clear()
        if parts:
            remedies.append(f'Keep the module in fp32 by initialize(..., lists={{"modules": {parts}}})')
        names = ", ".join(f"{path}.{name}".removeprefix(".") for path, name in new)
        sentence = (
            f"{type(model).__name__} writes buffers in {dtype_name(dtype)}, where {most} + 1 is {most}: a sum or count "
            f"in {names} stops growing"
        )
        remedy = ". ".join(remedies)
        self._losses.rows["buffer counts", type(model).__name__, names] = {
            "kind": "buffer counts", "step": None, "optimizer": None, "group": None, "sentence": sentence,
            "remedy": remedy,
        }  # fmt: skip
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
