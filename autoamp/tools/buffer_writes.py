"""Buffers of half models in which values add up: a count in half precision stops growing, and an average rounds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core import CastModels, Listener, version_of
from autoamp.errors import warn_user
from autoamp.tensors import HALF_DTYPES, dtype_name
from autoamp.tools.half_losses import found_by
from autoamp.torch_private import MODULES_OF_NORMS


class _Buffer(NamedTuple):
    """A buffer before a call: where it is, its version, and a copy of its values if an earlier call wrote it."""

    path: str
    part: Module
    name: str
    tensor: Tensor
    version: int | None
    value: Tensor | None


class BufferWrites(Listener):
    """Warns once of each half buffer in which calls of a model in training add up: a count, a sum or an average.

    The calls 1, 2, 4, 8 and so on of each model are looked at. A buffer that one of them writes, in place or by a new
    tensor, is compared with its values of before at the next one: what is overwritten, as a mask is, changes as a whole
    or not at all. torch's own modules are left out: norms have a warning of their own, and nothing adds up in other
    buffers of torch. Compiled code is not watched.

    Args:
        models: Those that are looked at where they are in half precision.

    Attributes:
        rows: One for each warning, as `HalfLosses` has them.
    """

    def __init__(self, models: CastModels) -> None:
        self.rows: list[dict[str, Any]] = []
        self._models = models
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
        before = found_by(self._buffers_of, module)
        return lambda outputs: None if outputs is None else self._call_ended(module, before)

    def _buffers_of(self, model: Module) -> Iterator[_Buffer]:
        for path, part in model.named_modules():
            if not part.training or isinstance(part, MODULES_OF_NORMS) or type(part).__module__.startswith("torch."):
                continue
            written, told = self._written.setdefault(part, set()), self._told.setdefault(part, set())
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.dtype in HALF_DTYPES and name not in told:
                    value = buffer.clone() if name in written else None
                    yield _Buffer(path, part, name, buffer, version_of(buffer), value)

    def _call_ended(self, model: Module, before: Iterable[_Buffer]) -> None:
        """Warn of the half buffers in which values were added up since."""
        new = found_by(self._added_up, before)
        if not new:
            return
        dtype = new[0].tensor.dtype
        most = round(2 / torch.finfo(dtype).eps)
        parts = {one.path: "fp32" for one in new}
        remedies = ["Register it as an integer or torch.float64 tensor, or one without dimensions, which are not cast"]
        if not parts.pop("", None):
            remedies.clear()
        if parts:
            remedies.append(f'Keep the module in fp32 by initialize(..., lists={{"modules": {parts}}})')
        names = ", ".join(f"{one.path}.{one.name}".removeprefix(".") for one in new)
        sentence = (
            f"{type(model).__name__} writes buffers in {dtype_name(dtype)}, where {most} + 1 is {most}: a sum or count "
            f"in {names} stops growing"
        )
        remedy = ". ".join(remedies)
        self.rows.append({
            "kind": "buffer counts", "step": None, "optimizer": None, "group": None, "sentence": sentence,
            "remedy": remedy,
        })  # fmt: skip
        warn_user(f"{sentence}. {remedy}")

    def _added_up(self, before: Iterable[_Buffer]) -> Iterator[_Buffer]:
        for one in before:
            now = one.part._buffers.get(one.name)
            if now is one.tensor and version_of(now) == one.version:
                continue
            self._written[one.part].add(one.name)
            # A half model within this one may have told of it.
            told = self._told[one.part]
            if one.value is not None and now is not None and one.name not in told and _adds_up(one.value, now):
                told.add(one.name)
                yield one


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
