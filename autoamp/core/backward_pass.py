"""One scaled backward pass: what it reaches, and what becomes of a gradient as it arrives.

A gradient is divided by the scale where it arrives at a leaf, before any hook of the program sees it, and looked
through for inf and nan there. What was found stays on the device. So ``.grad`` has true values from the first moment,
and hooks of the program get true gradients.

Which pass a hook is called by is asked of autograd, whose engine numbers its runs: several threads may run backward on
one model at once, a pass may run within another, and what runs on a device is called on autograd's own threads.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from autoamp.core.gradients import marks_of, true_gradient, unchecked, version_of
from autoamp.core.guard import OverflowCheck, StepGuard
from autoamp.core.loss_scale import LossScaler
from autoamp.tensors import HALF_DTYPES, iter_tensors, map_tensors
from autoamp.torch_private import current_graph_task

# Torch's own, which is not told of hooks.
_REGISTER_HOOK: Any = Tensor.register_hook


@dataclass(eq=False)
class ScaledPass:
    """One backward pass that is scaled, with all that run within its functions.

    Args:
        scaler: Is told of overflows.

    Attributes:
        scale: The scale of the pass.
        cleans: Whether 0 takes the place of a gradient that overflowed. Otherwise inf and nan stay, for a reduction
            over ranks to carry on.
        owners: The guards of the optimizers that step a tensor, by its id.
        retained: The tensors for which ``retain_grad()`` was called.
        now: Returns the pass that calls, None outside of passes.
        flags: One found_inf flag for each tensor that the pass reaches: 1.0 where its gradient had inf or nan. Those of
            tensors that are gone count too.
    """

    scaler: InitVar[LossScaler]
    scale: float
    cleans: bool
    owners: Mapping[int, list[StepGuard]]
    retained: Iterable[Tensor]
    now: Callable[[], ScaledPass | None]

    def __post_init__(self, scaler: LossScaler) -> None:
        factor = 1.0 / self.scale
        self._blank = scaler.unread.blank
        self._flags = WeakTensorKeyDictionary()
        self.flags: list[Tensor] = []
        self._check = OverflowCheck(scaler, self.scale, self.flags, running=self)
        self._factor = functools.cache(lambda device: torch.full((), factor, dtype=torch.float32, device=device))
        # By the id of a leaf whose gradients get true values as they arrive: the leaf, the hook there, and whether its
        # gradient, if nobody else writes it, is finite wherever all that arrives is.
        self._arrivals: dict[int, tuple[Any, Any, bool]] = {}
        # Leaves of a pass within, whose gradients go back into this one: they keep its scale.
        self._passed_on: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._inner: dict[int, _InnerGradient] = {}

    def take(self, reached: Iterable[Tensor], nodes: set[Any], *, within: bool = False) -> None:
        """Get ready for what a run of autograd's engine is about to reach, and tell the guards.

        Args:
            reached: The leaves, and what else ``inputs=`` names.
            nodes: The nodes of the graph.
            within: Whether a function of the pass begins the run, as that of a checkpoint does.
        """
        leaves = []
        for tensor in reached:
            if tensor.grad_fn is not None:
                # It is among the retained ones then: `AutoScale.grad_retained` is told.
                tensor.retain_grad()
            elif id(tensor) not in self._arrivals and not (within and self._passes_on(tensor)):
                leaves.append(tensor)
        inner = [one for one in list(self.retained) if one.grad_fn in nodes and id(one) not in self._inner]
        # Made here, where the streams of all that runs wait for what this one does.
        for tensor in (*leaves, *inner):
            self._flag(tensor)
            self._factor(tensor.device)
        for leaf in leaves:
            hook = register_first(leaf, OurHook(self._arrived, leaf))
            self._arrivals[id(leaf)] = leaf, hook, leaf.grad is None or self._adds_to_checked(leaf)
        self._inner.update({id(tensor): _InnerGradient(self, tensor) for tensor in inner})
        for guard in dict.fromkeys(guard for leaf in leaves for guard in self.owners.get(id(leaf), ())):
            self.concern(guard)

    def _passes_on(self, leaf: Tensor) -> bool:
        """Tell a copy that a function made of its input, to read its ``.grad``, from a leaf that the program knows."""
        if not isinstance(leaf, Parameter) and id(leaf) not in self.owners and leaf.grad is None:
            self._passed_on[id(leaf)] = leaf
        return self._passed_on.get(id(leaf)) is leaf

    def _adds_to_checked(self, leaf: Tensor) -> bool:
        """Whether a finite gradient that is added to that of a leaf leaves a finite one: it was checked."""
        # A sum of finite halves may be inf.
        return leaf.dtype not in HALF_DTYPES and not any(
            unchecked([leaf], guard.grads.checked) for guard in self.owners.get(id(leaf), ())
        )

    def concern(self, guard: StepGuard) -> None:
        """Let a guard wait for the check."""
        if self._check not in guard.grads.checks:
            guard.grads.expect(self._check)

    def _flag(self, tensor: Tensor) -> Tensor:
        """Return the flag of a tensor, a new one where there is none."""
        flag: Tensor | None = self._flags.get(tensor)
        if flag is None:
            flag = self._flags[tensor] = self._blank(tensor.device)
            self.flags.append(flag)
        return flag

    def cleared(self) -> list[Tensor]:
        """Return the tensors that live and whose gradients became 0, as they overflowed. Waits for the device."""
        return [tensor for tensor, flag in self._flags.items() if flag] if self.cleans else []

    def knows(self, leaf: Tensor) -> bool:
        """Whether gradients have true values once they have arrived at a leaf."""
        return id(leaf) in self._arrivals

    def _arrived(self, leaf: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Return the true gradient for a scaled one that arrives at a leaf, before all other hooks of the leaf."""
        if gradient is None or self.now() is not self:
            return None
        check = self._check
        if check.overflowed is not None:
            # An optimizer stepped in the middle of the pass: what comes now is for another check.
            check = self._check = OverflowCheck(check.scaler, self.scale, self.flags, earlier=check, running=self)
        for guard in self.owners.get(id(leaf), ()):
            # `concern` written out: this runs for each gradient.
            if check not in guard.grads.checks:
                guard.grads.expect(check)
        return self.true(leaf, gradient)

    def true(self, tensor: Tensor, gradient: Tensor) -> Tensor:
        """Return the true gradient of a tensor for a scaled one. Whether it overflowed is noted."""
        factor, flag = self._factor(tensor.device), self._flag(tensor)
        return true_gradient(gradient, 1.0 / self.scale, factor, flag, clean=self.cleans)

    @torch.no_grad()
    def still_overflowed(self, leaf: Tensor, gradient: Tensor) -> Tensor:
        """Return nan in place of what a hook made of a gradient that overflowed, where other ranks are to see it."""
        if self.cleans or gradient.layout is not torch.strided:
            return gradient
        # The flag has shape (1,). A gradient without dimensions needs one without.
        return torch.where(self._flag(leaf).reshape(()) != 0, math.nan, gradient)

    def close(self) -> None:
        """Take the hooks back, and give true gradients to what has them scaled as yet."""
        for inner in self._inner.values():
            inner.close()
        for leaf in self._passed_on.values():
            if leaf.grad is not None:
                # Not in place: it may share memory with what went back into the pass.
                leaf.grad = self.true(leaf, leaf.grad)
        sure: dict[StepGuard, list[Tensor]] = {}
        for leaf, hook, is_sure in self._arrivals.values():
            hook.remove()
            # A hook of the program may return or write another gradient than the one that arrived.
            if is_sure and not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks:
                for guard in self.owners.get(id(leaf), ()):
                    sure.setdefault(guard, []).append(leaf)
        for guard, leaves in sure.items():
            guard.grads.checked |= marks_of(leaves)
        self._passed_on.clear()
        # The guards have the check, and the check has this pass: no cycle stays.
        self._arrivals, self._inner, self.owners = {}, {}, {}
        del self._check


class OurHook(functools.partial[Any]):
    """A hook that auto_scaling registers for itself, and does not take for one of the program's."""


def register_first(tensor: Tensor, hook: OurHook) -> Any:
    """Register a hook that is called before all others of a tensor. Returns its handle."""
    registered = _REGISTER_HOOK(tensor, hook)
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
        self._registered = tensor.grad_fn.register_prehook(  # type: ignore[union-attr]
            lambda _: self._finish() if running.now() is running else None
        )

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


def can_begin_at(root: Any, gradient: Any) -> bool:
    """Whether a pass can begin at a root, with the gradient that is given for it."""
    if not isinstance(root, Tensor) or not root.requires_grad or not root.is_floating_point():
        return False
    return root.numel() == 1 if gradient is None else isinstance(gradient, Tensor) and gradient.shape == root.shape


def scaled_gradients(roots: Sequence[Any], given: Sequence[Any], scale: float, *, within: bool) -> list[Any]:
    """Return the gradients of the roots, 1 where none is given, times the scale.

    Args:
        roots: Where the pass begins.
        given: A gradient, or None, for each root; or nothing.
        scale: The scale.
        within: Whether the pass is a part of another, such as a checkpoint's: gradients that are given have its scale.
    """
    gradients = list(given) or [None] * len(roots)
    for place, (root, gradient) in enumerate(zip(roots, gradients, strict=True)):
        if gradient is not None:
            gradients[place] = gradient if within else gradient * scale
        elif can_begin_at(root, None):
            gradients[place] = torch.ones_like(root) * scale
    return gradients


def reached_by(roots: Iterable[Any], inputs: Iterable[Any] | None = None) -> tuple[list[Tensor], set[Any]]:
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
        # A property of torch, which makes a new tuple: this runs for each node of each scaled pass.
        following = node.next_functions
        if following:
            waiting += [one for one, _ in following]
        elif type(node).__name__ == "AccumulateGrad" and node.variable is not None:
            leaves[id(node.variable)] = node.variable
    if inputs is None:
        return list(leaves.values()), nodes
    wanted = {id(tensor): tensor for tensor in inputs if isinstance(tensor, Tensor)}
    return list(wanted.values()), nodes


class RunningPasses:
    """The scaled passes that run now in all threads, by the number of each run of autograd's engine.

    Args:
        casts_off: Makes a context without casts: what a hook computes from gradients is in the precision that it has
            them in.

    Attributes:
        casts_off: As given.
        by_run: The passes.
        hooked: The threads within a hook of the program, with the run that it is called by.
    """

    def __init__(self, casts_off: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.by_run: dict[int, ScaledPass] = {}
        self.casts_off = casts_off
        self.hooked: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def claimed(self, running: ScaledPass, roots: Iterable[Any]) -> Iterator[None]:
        """Let hooks at the roots say that the run of the engine within the ``with`` statement belongs to this pass."""
        hook = OurHook(self._claim, running, threading.get_ident())
        registered = [register_first(root, hook) for root in roots if isinstance(root, Tensor) and root.requires_grad]
        try:
            yield
        finally:
            for handle in registered:
                handle.remove()

    def _claim(self, running: ScaledPass, thread: int, gradient: Any) -> None:
        """Take note that the run of the engine that calls belongs to a pass, which began in a thread."""
        # Another thread may run through the same root. Autograd's own threads, which Python did not start, run what is
        # on a device.
        here = threading.current_thread()
        if here.ident == thread or isinstance(here, threading._DummyThread):
            self.by_run.setdefault(current_graph_task(), running)

    def end(self, running: ScaledPass) -> None:
        """Forget a pass."""
        for number in [number for number, other in list(self.by_run.items()) if other is running]:
            self.by_run.pop(number, None)

    def now(self) -> ScaledPass | None:
        """Return the pass within which this is called, None where it is none."""
        return self.by_run.get(current_graph_task()) if self.by_run else None

    def enclosing_pass(self) -> ScaledPass | None:
        """Return the pass of which a run of the engine that begins now is a part, None if it is a pass of its own.

        Within functions of a pass it is a part of that pass. Within the program's hooks, where gradients have true
        values, it is not.
        """
        return None if (threading.get_ident(), current_graph_task()) in self.hooked else self.now()


class Hook:
    """A hook of the program that is to see true gradients. It is copied and pickled as the hook itself.

    Args:
        hook: The hook.
        passes: The passes that may call it.
        tensor: What it is registered at, None for a module.
    """

    def __init__(self, hook: Callable[..., Any], passes: RunningPasses, tensor: Tensor | None = None) -> None:
        # Torch's own wrapper of a hook takes over what is in our __dict__, so that common names would hide its own.
        self._autoamp_hook = hook
        self._autoamp_passes = passes
        self._autoamp_tensor = None if tensor is None else weakref.ref(tensor)
        functools.update_wrapper(self, hook, updated=())

    def __call__(self, *args: Any) -> Any:
        """Call the hook as it is, or in the middle of a scaled pass as `within` does."""
        passes, here = self._autoamp_passes, (threading.get_ident(), current_graph_task())
        running = passes.now()
        if running is None:
            return self._autoamp_hook(*args)
        passes.hooked.append(here)
        try:
            with passes.casts_off():
                return self.within(running, *args)
        finally:
            passes.hooked.remove(here)

    def within(self, running: ScaledPass, *args: Any) -> Any:
        """Call the hook while a scaled pass runs."""
        raise NotImplementedError

    def __deepcopy__(self, memo: Any) -> Hook:
        return type(self)(copy.deepcopy(self._autoamp_hook, memo), self._autoamp_passes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._autoamp_hook,)


class GradientHook(Hook):
    """Gets gradients as arguments, and may return others for them."""

    def within(self, running: ScaledPass, *args: Any) -> Any:
        """Give the hook true gradients, and the pass what it makes of them, at its scale and in its dtypes."""
        leaf = None if self._autoamp_tensor is None else self._autoamp_tensor()
        scale = 1.0 if leaf is not None and running.knows(leaf) else running.scale
        true = [map_tensors(given, lambda gradient: _times(gradient, 1.0 / scale)) for given in args]
        # Of a module's hook the last but one if it gets both: those are the ones that it may replace.
        place = 1 if len(args) == 3 else -1
        versions = [version_of(tensor) for tensor in iter_tensors(true[place])]
        result = self._autoamp_hook(*true)
        if result is None and [version_of(tensor) for tensor in iter_tensors(true[place])] != versions:
            # It wrote to what it was given.
            result = true[place]
        result = _returned(result, args[place], scale)
        if leaf is None or scale != 1.0:
            return result
        return running.still_overflowed(leaf, args[place] if result is None else result)


class PostAccumulateHook(Hook):
    """Gets a tensor whose ``.grad`` is complete, and true."""

    def within(self, running: ScaledPass, *args: Any) -> Any:
        """Call the hook. It may not hide an overflow from other ranks."""
        result = self._autoamp_hook(*args)
        (tensor,) = args
        gradient = tensor.grad
        if gradient is not None and running.knows(tensor):
            now = running.still_overflowed(tensor, gradient)
            if now is not gradient:
                with torch.no_grad():
                    gradient.copy_(now)
        return result


def _times(gradient: Tensor, factor: float) -> Tensor:
    """Multiply a gradient, a half one in fp32, where its small values are not lost."""
    if factor == 1.0:
        return gradient
    return (gradient.float() if gradient.dtype in HALF_DTYPES else gradient) * factor


def _returned(result: Any, given: Any, scale: float) -> Any:
    """Return what a hook returned as the pass takes it: times the scale, in the dtypes of what it was given."""
    if isinstance(result, (tuple, list)):
        before = given if isinstance(given, (tuple, list)) else ()
        pairs = zip(result, (*before, *[None] * (len(result) - len(before))), strict=False)
        return type(result)(_returned(one, of, scale) for one, of in pairs)
    if not isinstance(result, Tensor):
        return result
    result = _times(result, scale)
    return result.to(given.dtype) if isinstance(given, Tensor) else result


def _same(value: Any) -> Any:
    return value
