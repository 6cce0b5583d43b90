"""One scaled backward pass: what it reaches, and the scale of gradients on the way in and out."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.gradients import non_finite, scale_, unscale_
from autoamp.scaling import LossScaler
from autoamp.stepping import StepGuard
from autoamp.tensors import HALF_DTYPES
from autoamp.verdicts import Verdict, read

__all__ = ["ScaledPass", "can_begin_at", "largest_scale", "listed", "reached_by", "scaled_gradients"]


class ScaledPass:
    """One backward pass that is scaled: brings gradients to its scale, and back."""

    def __init__(
        self,
        scaler: LossScaler,
        owners: Mapping[int, list[StepGuard]],
        retained: Iterable[Tensor],
        largest_scale: float,
    ) -> None:
        self.thread = threading.get_ident()
        self._scaler = scaler
        self._largest_scale = largest_scale
        # For the verdicts of gradients that are finished one by one: they are of one pass all the same.
        self._once = _UpdatedOnce(scaler)
        self._owners = owners
        self._retained = retained
        self._scale: float | None = None
        self._taken: dict[int, Tensor] = {}
        # What was there and cannot be scaled: half gradients would leave the range, and those with a graph are parts of
        # another. New ones are added to them afterwards.
        self._kept: dict[int, Tensor] = {}

    @property
    def scale(self) -> float:
        """The scale of the pass, settled once it has taken what it reaches."""
        return self._scale or 1.0

    def take(self, leaves: Iterable[Tensor], nodes: set[Any]) -> None:
        """Bring the gradients of what the pass is about to reach to its scale."""
        kept = [tensor for tensor in list(self._retained) if tensor.grad_fn in nodes]
        new = [tensor for tensor in (*leaves, *kept) if id(tensor) not in self._taken]
        for guard in self._guards_of(new):
            guard.finish_delayed()
            guard.forget_abandoned()
            guard.enter_block(1.0, False)
            guard.in_block = False
        if self._scale is None:
            # Only now: what was settled may have changed it.
            self._scale = min(self._scaler.loss_scale, self._largest_scale)
        self._taken.update({id(tensor): tensor for tensor in new})
        for tensor in new:
            if tensor.grad is not None and (tensor.dtype in HALF_DTYPES or tensor.grad.requires_grad):
                self._kept[id(tensor)], tensor.grad = tensor.grad, None
        scale_(new, self.scale)

    def finish_early(self, tensor: Tensor) -> None:
        """Finish one gradient while the pass goes on with others."""
        self._finish([tensor], self._once)

    def _finish(self, tensors: Sequence[Tensor], scaler: LossScaler) -> None:
        """Give gradients their true values, and the guards the verdict on them."""
        tensors = [tensor for tensor in tensors if self._taken.pop(id(tensor), None) is not None]
        fresh = [tensor for tensor in tensors if tensor.grad is not None]
        found = unscale_(fresh, 1.0 / self.scale)
        for tensor in tensors:
            before = self._kept.pop(id(tensor), None)
            if before is not None:
                tensor.grad = before if tensor.grad is None else _added(before, tensor.grad)
        if found:
            verdict = Verdict(scaler, self.scale, found)
            # The step is going to be skipped. Until then the program may look at the gradients, keep, clip, add or step
            # them by hand; the inf and nan of our scale are none of its business. Reading this waits for the device.
            read([verdict])
            if verdict.overflowed:
                verdict.cleared = _clear(fresh)
            for guard in self._guards_of(fresh):
                guard.leave_block(1.0, verdict)

    def close(self) -> None:
        """Finish what is left, also after an exception: who catches it and steps is kept from inf and nan."""
        self._finish(list(self._taken.values()), self._scaler)

    def _guards_of(self, tensors: Iterable[Tensor]) -> list[StepGuard]:
        return list(dict.fromkeys(guard for tensor in tensors for guard in self._owners.get(id(tensor), ())))


class _UpdatedOnce(LossScaler):
    """A loss scaler that hears of one update only, the first."""

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler: LossScaler | None = scaler
        super().__init__(scaler.loss_scale)

    @property
    def checks(self) -> bool:
        return True

    def update(self, found_inf: bool) -> None:
        if self._scaler is not None:
            self._scaler.update(found_inf)
            self._loss_scale, self._scaler = self._scaler.loss_scale, None


@torch.no_grad()
def _added(one: Tensor, other: Tensor) -> Tensor:
    return one.add_(other) if one.layout is other.layout is torch.strided else one + other


@torch.no_grad()
def _clear(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make all gradients 0. Returns some of the tensors whose gradients were not finite."""
    culprits = non_finite((tensor, tensor.grad) for tensor in tensors if tensor.grad is not None)
    for tensor in tensors:
        if tensor.grad is not None:
            tensor.grad.zero_()
    return culprits


def listed(tensors: Any) -> list[Any]:
    """Return one tensor, or a sequence of them, as a list; nothing as an empty one."""
    if tensors is None:
        return []
    return list(tensors) if isinstance(tensors, Sequence) else [tensors]


def can_begin_at(root: Any, gradient: Any) -> bool:
    """Tell whether a pass can begin at a root, with the gradient that is given for it."""
    if not isinstance(root, Tensor) or not root.requires_grad or not root.is_floating_point():
        return False
    return root.numel() == 1 if gradient is None else isinstance(gradient, Tensor) and gradient.shape == root.shape


def largest_scale(roots: Sequence[Tensor]) -> float:
    """Return the largest scale that the gradients of all roots can hold: 2**15 in fp16, a power of 2 below its end."""
    return 2.0**15 if any(root.dtype is torch.float16 for root in roots) else math.inf


@torch.no_grad()
def scaled_gradients(roots: Sequence[Tensor], given: Sequence[Any], scale: float) -> list[Tensor]:
    """Return the gradients of the roots, 1 where none is given, times the scale."""
    pairs = zip(roots, given or [None] * len(roots), strict=True)
    return [(torch.ones_like(root) if gradient is None else gradient) * scale for root, gradient in pairs]


def reached_by(roots: Iterable[Any], inputs: Any) -> tuple[list[Tensor], set[Any]]:
    """Return the tensors into whose ``.grad`` a pass writes, and the nodes of its graph."""
    leaves: dict[int, Tensor] = {}
    nodes: set[Any] = set()
    waiting = []
    for root in roots:
        if isinstance(root, Tensor) and root.grad_fn is None:
            leaves[id(root)] = root
        waiting.append(getattr(root, "grad_fn", None))
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        # Only the node at a leaf has a variable.
        variable = getattr(node, "variable", None) if node.name().endswith("AccumulateGrad") else None
        if variable is not None:
            leaves[id(variable)] = variable
        waiting.extend(following for following, _ in node.next_functions)
    if inputs is None:
        return list(leaves.values()), nodes
    wanted = [tensor for tensor in listed(inputs) if isinstance(tensor, Tensor)]
    return wanted, nodes
