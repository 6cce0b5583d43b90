"""Hooks while a scaled pass runs: ours at the leaves, where gradients get their true values, and the program's.

Which pass a hook is called by is asked of autograd, whose engine numbers its runs: several threads may run backward on
one model at once, a pass may run within another, and what runs on a device is called on autograd's own threads.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from autoamp.auto_scaling.backward_pass import ScaledPass
from autoamp.errors import UsageError
from autoamp.tensors import HALF_DTYPES, iter_tensors
from autoamp.torch_private import TELLS_GRAPH_TASKS, current_graph_task

__all__ = ["Arrivals", "GradientHook", "Hook", "PostAccumulateHook", "RunningPasses", "is_ours"]


class _Hooked(threading.local):
    """The runs in which a thread is within a hook of the program, the innermost last."""

    def __init__(self) -> None:
        self.runs: list[int] = []


class RunningPasses:
    """The scaled passes that run now, in all threads."""

    def __init__(self) -> None:
        self._open: list[ScaledPass] = []
        self._by_run: dict[int, ScaledPass] = {}
        self._hooked = _Hooked()
        self._lock = threading.Lock()
        self.arrivals = Arrivals(self.now)

    @contextlib.contextmanager
    def opened(self, running: ScaledPass) -> Iterator[None]:
        """Let a pass run within the ``with`` statement.

        Raises:
            UsageError: Another thread's pass runs, and this torch cannot tell their hooks apart.
        """
        with self._lock:
            if not TELLS_GRAPH_TASKS and any(other.thread != running.thread for other in self._open):
                raise UsageError(
                    "two threads run backward at once, and this release of torch cannot tell their hooks apart; use "
                    "bf16, which needs no loss scale, or let one thread do it"
                )
            self._open.append(running)
        try:
            yield
        finally:
            leaves = list(running.leaves.values())
            try:
                running.close()
            finally:
                self.arrivals.unhook(leaves)
                with self._lock:
                    self._open.remove(running)
                    for number in running.runs:
                        self._by_run.pop(number, None)

    @contextlib.contextmanager
    def claimed(self, running: ScaledPass, roots: Iterable[Any]) -> Iterator[None]:
        """Let hooks at the roots say that the run of the engine within the ``with`` statement belongs to this pass."""
        running.unclaimed += 1
        registered = [
            _register_first(root, _Claim(self, running))
            for root in roots
            if isinstance(root, Tensor) and root.requires_grad and root.grad_fn is not None
        ]
        try:
            yield
        finally:
            running.unclaimed = 0
            for hook in registered:
                hook.remove()

    def now(self) -> ScaledPass | None:
        """Return the pass within which this is called, None where it is none."""
        if not self._open:
            return None
        number = current_graph_task()
        known = self._by_run.get(number)
        if known is not None or (number == -1 and TELLS_GRAPH_TASKS):
            return known
        # Without numbers one thread's passes alone are open, and what calls is taken for the last.
        return self._by_thread(number)

    def joinable(self) -> ScaledPass | None:
        """Return the pass of which a run of the engine that begins now is a part, None if it is a pass of its own.

        Within functions of a pass it is a part of that pass. Within the program's hooks, where gradients have true
        values, it is not.
        """
        running = self.now()
        runs = self._hooked.runs
        return None if runs and running is not None and runs[-1] == current_graph_task() else running

    def _by_thread(self, number: int) -> ScaledPass | None:
        """Find the pass of a run that no root has claimed: one that begins at a leaf, say."""
        waiting = [running for running in self._open if running.unclaimed or not TELLS_GRAPH_TASKS]
        if not _is_autograds_thread():
            waiting = [running for running in waiting if running.thread == threading.get_ident()][-1:]
        if len(waiting) > 1:
            raise UsageError(
                "two threads run backward at once, and whose gradient this is cannot be told; call backward() on a "
                "loss, not on a leaf, or use bf16, which needs no loss scale"
            )
        if waiting:
            self.claim(waiting[0], number)
        return waiting[0] if waiting else None

    def claim(self, running: ScaledPass, number: int) -> None:
        """Take note of the number of a pass's run."""
        if number != -1 and running.unclaimed and number not in self._by_run:
            running.unclaimed -= 1
            running.runs.append(number)
            self._by_run[number] = running

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Take note that a hook of the program runs."""
        self._hooked.runs.append(current_graph_task())
        try:
            yield
        finally:
            self._hooked.runs.pop()


def _is_autograds_thread() -> bool:
    """Tell whether this thread was not started by Python: autograd's own threads run the passes of others."""
    return isinstance(threading.current_thread(), threading._DummyThread)


class _Ours:
    """The base of hooks that this module registers for itself."""


class _Claim(_Ours):
    """Says at a root whose run this is."""

    def __init__(self, passes: RunningPasses, running: ScaledPass) -> None:
        self._passes = passes
        self._running = running

    def __call__(self, gradient: Any) -> None:
        mine = threading.get_ident() == self._running.thread
        if mine or _is_autograds_thread():
            self._passes.claim(self._running, current_graph_task())


class Arrivals:
    """Our hooks at leaves, first of all there, for as long as a pass runs that reaches them.

    Args:
        now: Returns the pass within which it is called.
    """

    def __init__(self, now: Callable[[], ScaledPass | None]) -> None:
        self._now = now
        self._lock = threading.Lock()
        # Passes of several threads share one hook.
        self._hooks: dict[int, tuple[int, Any]] = {}

    def hook(self, leaves: Iterable[Tensor]) -> None:
        """See to it that gradients that arrive have true values."""
        with self._lock:
            for leaf in leaves:
                count, hook = self._hooks.get(id(leaf), (0, None))
                self._hooks[id(leaf)] = count + 1, hook or _register_first(leaf, _Arrival(leaf, self._now))

    def unhook(self, leaves: Iterable[Tensor]) -> None:
        """Take the hooks away again, once this was called as often as `hook`."""
        with self._lock:
            for leaf in leaves:
                count, hook = self._hooks.pop(id(leaf), (0, None))
                if count > 1:
                    self._hooks[id(leaf)] = count - 1, hook
                elif hook is not None:
                    hook.remove()


class _Arrival(_Ours):
    def __init__(self, leaf: Tensor, now: Callable[[], ScaledPass | None]) -> None:
        self._leaf = weakref.ref(leaf)
        self._now = now

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        running, leaf = self._now(), self._leaf()
        return None if running is None or leaf is None or gradient is None else running.arrived(leaf, gradient)


def _register_first(tensor: Tensor, hook: _Ours) -> Any:
    """Register a hook that is called before all others of a tensor."""
    registered = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    if len(hooks) > 1:
        # The engine goes by the order of a plain dict, which is not that of move_to_end().
        others = {name: other for name, other in hooks.items() if name != registered.id}
        for name in others:
            del hooks[name]
        hooks.update(others)
    return registered


def is_ours(hook: Any) -> bool:
    """Tell whether a hook is one that this module made."""
    return isinstance(hook, (_Ours, Hook))


class Hook:
    """A hook of the program that is to see true gradients. It is copied and pickled as the hook itself.

    Args:
        hook: The hook.
        passes: The passes that may call it.
        casts_off: Makes a context without casts: what the program computes from gradients is in the precision that it
            has them in.
        tensor: What it is registered at, None for a module.
    """

    def __init__(
        self,
        hook: Callable[..., Any],
        passes: RunningPasses,
        casts_off: Callable[[], AbstractContextManager[Any]],
        tensor: Tensor | None = None,
    ) -> None:
        # Torch's own wrapper of a hook takes over what is in our __dict__, so that common names would hide its own.
        self._autoamp_hook = hook
        self._autoamp_passes = passes
        self._autoamp_casts_off = casts_off
        self._autoamp_tensor = None if tensor is None else weakref.ref(tensor)
        functools.update_wrapper(self, hook, updated=())

    def __call__(self, *args: Any) -> Any:
        """Call the hook as it is, or in the middle of a scaled pass as `within` does."""
        running = self._autoamp_passes.now()
        if running is None:
            return self._autoamp_hook(*args)
        with self._autoamp_passes.hooked(), self._autoamp_casts_off():
            return self.within(running, *args)

    def within(self, running: ScaledPass, *args: Any) -> Any:
        """Call the hook while a scaled pass runs."""
        raise NotImplementedError

    def __deepcopy__(self, memo: Any) -> Hook:
        copied = copy.deepcopy(self._autoamp_hook, memo)
        return type(self)(copied, self._autoamp_passes, self._autoamp_casts_off)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._autoamp_hook,)


class GradientHook(Hook):
    """Gets gradients as arguments, and may return others for them."""

    def within(self, running: ScaledPass, *args: Any) -> Any:
        """Give the hook true gradients, and the pass what it makes of them, at its scale and in its dtypes."""
        leaf = None if self._autoamp_tensor is None else self._autoamp_tensor()
        scale = 1.0 if leaf is not None and running.knows(leaf) else running.scale
        true = [_each(lambda gradient: _times(gradient, 1.0 / scale), given) for given in args]
        # Of a module's hook the last but one if it gets both: those are the ones that it may replace.
        place = 1 if len(args) == 3 else -1
        versions = [tensor._version for tensor in _tensors(true[place])]
        result = self._autoamp_hook(*true)
        if result is None and [tensor._version for tensor in _tensors(true[place])] != versions:
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
        gradient = args[0].grad
        if gradient is not None and running.knows(args[0]):
            now = running.still_overflowed(args[0], gradient)
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
    before = given[0] if isinstance(given, (tuple, list)) and len(given) == 1 else given
    result = _times(result, scale)
    return result.to(before.dtype) if isinstance(before, Tensor) else result


def _same(value: Any) -> Any:
    return value


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in iter_tensors(values) if not value.is_inference()]


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_each(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value
