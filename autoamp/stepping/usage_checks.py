"""A loss in fp16 that nobody scales, by which training dies quietly."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autoamp.errors import warn_user

# Of an optimizer whose losses nobody scales these steps are looked at, each of which waits for the device.
_STEPS = frozenset({1, 10, 100, 1000})


class UnderflowWatch:
    """Warns once of fp16 gradients that vanish, as nobody scales the loss. For optimizers without a loss scale."""

    def __init__(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._said = False

    def look(self, optimizer: Any, params: Iterable[Tensor]) -> None:
        """Look at the gradients that an optimizer is about to step by, at some of its steps."""
        if self._said:
            return
        step = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if step not in _STEPS:
            return
        found = _share_that_vanishes(params)
        if found is not None:
            self._said = True
            name = type(optimizer).__name__
            warn_user(
                f"{found:.0%} of {name}'s gradients underflow in fp16 (0, or below "
                f"{torch.finfo(torch.float16).tiny:.2g}), and the loss is not scaled. Scale it with "
                "`with handle.scale_loss(loss, optimizer) as scaled_loss`, call handle.auto_scale(), or use bf16"
            )


def _share_that_vanishes(params: Iterable[Tensor]) -> float | None:
    """Return the part of all gradients that fp16 does not hold in full, where it is most of those that are not 0."""
    least = torch.finfo(torch.float16).tiny
    grads = [param.grad for param in params if param.grad is not None]
    dense = [grad.detach() for grad in grads if grad.layout is torch.strided and grad.is_floating_point()]
    if not dense:
        return None
    held = torch.stack([(~(grad.abs() < least)).sum().cpu() for grad in dense]).sum().item()
    some = torch.stack([(grad != 0).sum().cpu() for grad in dense]).sum().item()
    every = sum(grad.numel() for grad in dense)
    return None if held * 2 >= some > 0 or not every else 1 - held / every
