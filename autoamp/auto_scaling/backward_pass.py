"""One scaled backward pass: what it reaches, and what becomes of a gradient as it arrives.

A gradient is divided by the scale where it arrives at a leaf, before any hook of the program sees it, and looked
through for inf and nan there. What was found stays on the device. So ``.grad`` has true values from the first moment.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from autoamp.scaling import LossScaler, true_gradient
from autoamp.stepping import OverflowCheck, StepGuard
from autoamp.tensors import HALF_DTYPES


class Flags:
    """One found_inf flag for each tensor that a pass reaches: 1.0 where its gradient had inf or nan.

    Args:
        blank: Returns a new flag on a device, 0.0.

    Attributes:
        all: All flags. Those of tensors that are gone count too.
    """

    def __init__(self, blank: Callable[[torch.device], Tensor]) -> None:
        self._blank = blank
        self._of = WeakTensorKeyDictionary()
        self.all: list[Tensor] = []

    def get(self, tensor: Tensor) -> Tensor:
        """Return the flag of a tensor, a new one where there is none."""
        if tensor not in self._of:
            self._of[tensor] = self._blank(tensor.device)
            self.all.append(self._of[tensor])
        flag: Tensor = self._of[tensor]
        return flag

    def flagged(self) -> list[Tensor]:
        """Return the tensors that live and whose flag is set. Waits for the device."""
        return [tensor for tensor, flag in self._of.items() if flag]


class PassCheck(OverflowCheck):
    """The check of a backward pass. As long as nobody has read it, it goes by all gradients that have arrived.

    Args:
        scaler: The scaler of the pass.
        scale: The scale of the pass.
        flags: What was found, and is being found.
        cleans: Whether 0 takes the place of gradients that overflowed.
        earlier: An earlier check of the same pass, if there is one.
    """

    # What arrives after it was read is for another check, so a step is to read it.
    is_complete = False

    def __init__(
        self, scaler: LossScaler, scale: float, flags: Flags, *, cleans: bool, earlier: PassCheck | None = None
    ) -> None:
        super().__init__(scaler, scale, (), earlier)
        self._flags = flags
        self._cleans = cleans

    @property
    def found(self) -> Sequence[Tensor]:
        """The flags to read: those of this rank, or what all ranks agreed on; none once they were read."""
        return super().found if self._found or self.overflowed is not None else self._flags.all

    @property
    def cleared(self) -> Sequence[Tensor]:
        """The tensors whose gradients overflowed, if 0 took their place. Waits for the device."""
        return self._flags.flagged() if self._cleans else ()


class ScaledPass:
    """One backward pass that is scaled, with all that run within its functions.

    Args:
        scaler: Gives the scale, and hears of overflows.
        owners: The guards of the optimizers that step a tensor, by its id.
        largest_scale: The scale is no higher.
        keeps: Objects that live as long as the pass, such as the optimizers, to which their guards refer weakly.
        retained: The tensors for which ``retain_grad()`` was called.
        cleans: Whether 0 takes the place of a gradient that overflowed. Otherwise inf and nan stay, for a reduction
            over ranks to carry on.
        now: Returns the pass that calls, None outside of passes.

    Attributes:
        scale: The scale of the pass.
        thread: The thread that runs it.
    """

    def __init__(
        self,
        scaler: LossScaler,
        owners: Mapping[int, list[StepGuard]],
        largest_scale: float,
        *,
        keeps: object = None,
        retained: Iterable[Tensor] = (),
        cleans: bool,
        now: Callable[[], ScaledPass | None],
    ) -> None:
        self.thread = threading.get_ident()
        self.scale = min(scaler.loss_scale, largest_scale)
        self._factors: dict[torch.device, Tensor] = {}
        self._owners = owners
        self._keeps = keeps
        self._retained = retained
        self._cleans = cleans
        self._now = now
        self._flags = Flags(scaler.unread.blank)
        self._check = PassCheck(scaler, self.scale, self._flags, cleans=cleans)
        # The hooks at leaves, whose gradients get true values as they arrive, by the leaf's id.
        self._arrivals: dict[int, Any] = {}
        # Leaves whose gradients, if nobody else writes them, are finite wherever all that arrives is.
        self._sure: dict[int, weakref.ref[Tensor]] = {}
        # Leaves of a pass within, whose gradients go back into this one: they keep its scale.
        self._passed_on: dict[int, weakref.ref[Tensor]] = {}
        self._inner: dict[int, _InnerGradient] = {}

    def take(self, reached: Iterable[Tensor], nodes: set[Any], *, within: bool = False) -> None:
        """Get ready for what a run of autograd's engine is about to reach, and tell the guards.

        Args:
            reached: The leaves, and what else ``inputs=`` names.
            nodes: The nodes of the graph.
            within: Whether a function of the pass begins the run, as that of a checkpoint does.
        """
        reached = list(reached)
        leaves = [leaf for leaf in reached if leaf.grad_fn is None and not self.knows(leaf)]
        if within:
            leaves = [leaf for leaf in leaves if not self._passes_on(leaf)]
        inner = [tensor for tensor in reached if tensor.grad_fn is not None]
        for tensor in inner:
            tensor.retain_grad()
        inner += [tensor for tensor in list(self._retained) if tensor.grad_fn in nodes]
        new = {id(tensor): tensor for tensor in inner if id(tensor) not in self._inner}
        for tensor in (*leaves, *new.values()):
            # Made here, where the streams of all that runs wait for what this one does.
            self._flags.get(tensor)
            self._factor(tensor.device)
        self._sure.update({id(leaf): weakref.ref(leaf) for leaf in leaves if self._adds_to_checked(leaf)})
        self._arrivals.update({id(leaf): register_first(leaf, _Arrival(self, leaf)) for leaf in leaves})
        self._inner.update({name: _InnerGradient(self, tensor) for name, tensor in new.items()})
        for guard in dict.fromkeys(guard for leaf in leaves for guard in self._owners.get(id(leaf), ())):
            self.concern(guard)

    def _passes_on(self, leaf: Tensor) -> bool:
        """Tell a copy that a function made of its input, to read its ``.grad``, from a leaf that the program knows."""
        known = self._passed_on.get(id(leaf))
        if known is not None and known() is leaf:
            return True
        if isinstance(leaf, Parameter) or id(leaf) in self._owners or leaf.grad is not None:
            return False
        self._passed_on[id(leaf)] = weakref.ref(leaf)
        return True

    def _adds_to_checked(self, leaf: Tensor) -> bool:
        """Whether a finite gradient that arrives leaves a finite one: there is none yet, or one that was checked."""
        if leaf.grad is None:
            return True
        # A sum of finite halves may be inf.
        return leaf.dtype not in HALF_DTYPES and not any(
            guard.pending.checked.unchecked([leaf]) for guard in self._owners.get(id(leaf), ())
        )

    def concern(self, guard: StepGuard) -> None:
        """Let a guard wait for the check."""
        if self._check not in guard.pending.checks:
            guard.pending.expect(self._check)

    def knows(self, leaf: Tensor) -> bool:
        """Whether gradients have true values once they have arrived at a leaf."""
        return id(leaf) in self._arrivals

    def arrived(self, leaf: Tensor, gradient: Tensor) -> Tensor:
        """Return the true gradient for a scaled one that arrives at a leaf. Whether it overflowed is noted."""
        check = self._check
        if check.overflowed is not None:
            # An optimizer stepped in the middle of the pass: what comes now is for another check.
            self._check = PassCheck(check.scaler, self.scale, self._flags, cleans=self._cleans, earlier=check)
        for guard in self._owners.get(id(leaf), ()):
            self.concern(guard)
        return self.true(leaf, gradient)

    def true(self, tensor: Tensor, gradient: Tensor) -> Tensor:
        """Return the true gradient of a tensor for a scaled one. Whether it overflowed is noted."""
        factor, flag = self._factor(tensor.device), self._flags.get(tensor)
        return true_gradient(gradient, 1.0 / self.scale, factor, flag, clean=self._cleans)

    def _factor(self, device: torch.device) -> Tensor:
        if device not in self._factors:
            self._factors[device] = torch.full((), 1.0 / self.scale, dtype=torch.float32, device=device)
        return self._factors[device]

    @torch.no_grad()
    def still_overflowed(self, leaf: Tensor, gradient: Tensor) -> Tensor:
        """Return nan in place of what a hook made of a gradient that overflowed, where other ranks are to see it."""
        if self._cleans or gradient.layout is not torch.strided:
            return gradient
        # The flag has shape (1,). A gradient without dimensions needs one without.
        return torch.where(self._flags.get(leaf).reshape(()) != 0, math.nan, gradient)

    def is_now(self) -> bool:
        """Whether this pass calls."""
        return self._now() is self

    def close(self) -> None:
        """Take the hooks back, and give true gradients to what has them scaled as yet."""
        for inner in self._inner.values():
            inner.close()
        for reference in self._passed_on.values():
            leaf = reference()
            if leaf is not None and leaf.grad is not None:
                # Not in place: it may share memory with what went back into the pass.
                leaf.grad = self.true(leaf, leaf.grad)
        for hook in self._arrivals.values():
            hook.remove()
        for name in self._arrivals:
            leaf = self._sure[name]() if name in self._sure else None
            if leaf is not None and not _has_hooks(leaf):
                for guard in self._owners.get(name, ()):
                    guard.pending.checked.note([leaf])
        self._arrivals, self._inner, self._passed_on, self._sure = {}, {}, {}, {}


def _has_hooks(leaf: Any) -> bool:
    """Whether the program has hooks at a leaf, which may return or write another gradient than the one that arrived."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


class OurHook:
    """The base of hooks that auto_scaling registers for itself."""


class _Arrival(OurHook):
    """Stands before all other hooks of a leaf while a pass runs: they see true gradients."""

    def __init__(self, running: ScaledPass, leaf: Tensor) -> None:
        self._running = running
        self._leaf = weakref.ref(leaf)

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        leaf = self._leaf()
        if leaf is None or gradient is None or not self._running.is_now():
            return None
        return self._running.arrived(leaf, gradient)


def register_first(tensor: Tensor, hook: OurHook) -> Any:
    """Register a hook that is called before all others of a tensor. Returns its handle."""
    registered = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    if len(hooks) > 1:
        # The engine goes by the order of a plain dict, which is not that of move_to_end().
        others = {name: other for name, other in hooks.items() if name != registered.id}
        for name in others:
            del hooks[name]
        hooks.update(others)
    return registered


class _InnerGradient:
    """The ``.grad`` of a tensor within the graph: what the pass writes there is scaled, until its node runs."""

    def __init__(self, running: ScaledPass, tensor: Tensor) -> None:
        self._running = running
        self._tensor = tensor
        self._before, tensor.grad = tensor.grad, None
        # Torch writes the gradient after all hooks of the tensor, and before those of the node.
        self._registered = tensor.grad_fn.register_prehook(self._arrived)  # type: ignore[union-attr]

    def _arrived(self, gradients: Any) -> None:
        if self._running.is_now():
            self._finish()

    def close(self) -> None:
        """Come to an end, also where the node never ran."""
        self._registered.remove()
        self._finish()

    def _finish(self) -> None:
        tensor, before = self._tensor, self._before
        if tensor.grad is None:
            tensor.grad = before
        elif tensor.grad is not before:
            true = self._running.true(tensor, tensor.grad)
            tensor.grad = true if before is None else before + true
        self._before = tensor.grad


def as_list(tensors: Any) -> list[Any]:
    """Return one tensor, or a sequence of them, as a list; nothing as an empty one."""
    if tensors is None:
        return []
    return list(tensors) if isinstance(tensors, Sequence) else [tensors]


def can_begin_at(root: Any, gradient: Any) -> bool:
    """Whether a pass can begin at a root, with the gradient that is given for it."""
    if not isinstance(root, Tensor) or not root.requires_grad or not root.is_floating_point():
        return False
    return root.numel() == 1 if gradient is None else isinstance(gradient, Tensor) and gradient.shape == root.shape


def largest_scale(roots: Sequence[Tensor]) -> float:
    """Return the largest scale that fits the gradients of all roots: 2**15 in fp16, a power of 2 below its end."""
    return 2.0**15 if any(root.dtype is torch.float16 for root in roots) else math.inf


def scaled_gradients(roots: Sequence[Tensor], given: Sequence[Any], scale: float) -> list[Tensor]:
    """Return the gradients of the roots, 1 where none is given, times the scale."""
    pairs = zip(roots, given or [None] * len(roots), strict=True)
    return [(torch.ones_like(root) if gradient is None else gradient) * scale for root, gradient in pairs]


def reached_by(roots: Iterable[Any], inputs: Any = None) -> tuple[list[Tensor], set[Any]]:
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
    wanted = [tensor for tensor in as_list(inputs) if isinstance(tensor, Tensor)]
    return wanted, nodes
