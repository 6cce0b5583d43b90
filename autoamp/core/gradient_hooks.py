"""Hooks of the program while a scaled pass runs: they get true gradients.

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
from typing import Any

import torch
from torch import Tensor

from autoamp.core.backward_pass import OurHook, ScaledPass, register_first
from autoamp.tensors import HALF_DTYPES, iter_tensors, map_tensors, version_of
from autoamp.torch_private import current_graph_task


class RunningPasses:
    """The scaled passes that run now in all threads, by the number of each run of autograd's engine.

    Args:
        casts_off: Makes a context without casts: what a hook computes from gradients is in the precision that it has
            them in.

    Attributes:
        casts_off: As given.
        hooked: The threads within a hook of the program, with the run that it is called by.
    """

    def __init__(self, casts_off: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._by_run: dict[int, ScaledPass] = {}
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
            self._by_run.setdefault(current_graph_task(), running)

    def end(self, running: ScaledPass) -> None:
        """Forget a pass."""
        for number in [number for number, other in list(self._by_run.items()) if other is running]:
            self._by_run.pop(number, None)

    def now(self) -> ScaledPass | None:
        """Return the pass within which this is called, None where it is none."""
        return self._by_run.get(current_graph_task()) if self._by_run else None

    def joinable(self) -> ScaledPass | None:
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
