"""The process's one handle: `init()`, `region()`, and the functions that act on whichever handle is active."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from autoamp.casting import Casts
from autoamp.errors import UsageError
from autoamp.rules import CastPolicy
from autoamp.runtime.handle import Handle, Settings
from autoamp.runtime.no_op import NoOpHandle
from autoamp.runtime.registry import Registry

__all__ = [
    "ActiveHandles",
    "Region",
    "current_handle",
    "disable_casts",
    "float_function",
    "half_function",
    "handles",
    "init",
    "needed_handle",
    "promote_function",
    "put_handle",
    "region",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]


class ActiveHandles:
    """Which handle is active, since torch's namespace is one to a process; and what was registered for all handles.

    ``init`` sets the base handle. Each open region stands above it, with the handle that serves it: the base, or one of
    its own in whose favour the handle below is suspended.

    Attributes:
        lock: Held while handles come and go.
        registry: The functions that were decorated and registered.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.registry = Registry(self.casts)
        self._handle: Handle | None = None
        self._base: Handle | NoOpHandle | None = None
        self._open: list[tuple[Handle, int]] = []
        self._suspended: set[Handle] = set()

    @property
    def handle(self) -> Handle | None:
        """The active handle, None where torch is not patched."""
        handle = self._handle
        return handle if handle is not None and handle.is_active() else None

    @property
    def base(self) -> Handle | NoOpHandle | None:
        """What serves outside of regions, if it is active or the one that does nothing."""
        handle = self._base
        return handle if isinstance(handle, NoOpHandle) or (handle is not None and handle.is_active()) else None

    def casts(self) -> Casts | None:
        """Return the casts of the active handle, None where they are off."""
        handle = self._handle
        return handle.casts if handle is not None and handle.is_active() and handle.casts.state() is not False else None

    def put_base(self, handle: Handle | NoOpHandle | None, end: Callable[[Handle], object] | None = None) -> None:
        """Make ``handle`` what is active outside of regions, and end the one before. On an error nothing changes.

        Args:
            handle: None for no handle.
            end: Called with the one before, which is suspended, in the place of its ``deactivate()``.
        """
        with self.lock:
            if any(serving is not self._base for serving, _ in self._open):
                raise UsageError("torch cannot be patched anew while a region is open; leave the region's block first")
            before = self.handle
            self._switch(None if isinstance(handle, NoOpHandle) else handle)
            self._base = handle
            if before is not None:
                self._suspended.discard(before)
                before.deactivate() if end is None else end(before)

    def enter(self, settings: Settings | None, own: Callable[[], Handle]) -> Handle:
        """Open a region and return the handle that serves it: the active one where its settings do, else ``own()``."""
        thread = threading.get_ident()
        with self.lock:
            handle = self.handle
            if handle is None or (settings is not None and handle.settings != settings):
                if any(other != thread for _, other in self._open):
                    raise UsageError(
                        "a region with other settings is open in another thread, and torch can be patched in one way "
                        "at a time; use the same settings in both, or one region after the other"
                    )
                handle = own()
                self._switch(handle)
            self._open.append((handle, thread))
            return handle

    def leave(self, handle: Handle) -> None:
        """Close this thread's latest region of ``handle``; the last one to leave brings back what was there before."""
        with self.lock:
            at = max(i for i, entry in enumerate(self._open) if entry == (handle, threading.get_ident()))
            del self._open[at]
            below = self._open[-1][0] if self._open else self._base
            # One that its owner deactivated is not ours to bring back.
            below = below if isinstance(below, Handle) and not below.ended else None
            if handle is self._handle and handle is not below:
                self._switch(below if below in self._suspended else None)
                self._suspended.discard(handle)

    def _switch(self, handle: Handle | None) -> None:
        """Suspend the active handle and activate another. On an error nothing changes."""
        before = self.handle
        if before is not None:
            before.suspend()
        # It is active from within `activate` on, and whoever hears of that finds it here.
        self._handle = handle
        try:
            if handle is not None:
                self.registry.prepare(handle.casts)
                handle.activate(self.registry.targets())
        except BaseException:
            self._handle = before
            if before is not None:
                before.activate(self.registry.targets())
            raise
        if before is not None:
            self._suspended.add(before)
        if handle is not None:
            self._suspended.discard(handle)

    def register(self, module: Any, name: str, policy: CastPolicy) -> None:
        """Put ``module.name`` under a policy, now and for handles to come."""
        with self.lock:
            target = self.registry.add(module, name, policy)
            if self.handle is not None:
                self.handle.patch(target)


handles = ActiveHandles()


def put_handle(handle: Handle | NoOpHandle | None, end: Callable[[Handle], object] | None = None) -> None:
    """Make ``handle`` the active one in place of the one before; None only takes that one back.

    Args:
        handle: None for none.
        end: Called with the one before in the place of its ``deactivate()``.
    """
    handles.put_base(handle, end)


def current_handle() -> Handle | None:
    """Return the active handle, None where torch is not patched."""
    return handles.handle


def needed_handle(caller: str) -> Handle | NoOpHandle:
    """Return what scales losses now: the active handle, or the one that does nothing after ``enabled=False``.

    Raises:
        UsageError: Neither `initialize` nor `init` was called. The message begins with the name of the caller.
    """
    handle = handles.handle or handles.base
    if handle is None:
        raise UsageError(
            f"{caller}() needs a handle; call autoamp.initialize(model, optimizer) or autoamp.init() first"
        )
    return handle


# -- the public functions --


def init(
    enabled: bool = True,
    loss_scale: Any = None,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = True,
    *,
    lists: Any = None,
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    rebind: bool = True,
    scope: str = "global",
) -> Handle | NoOpHandle:
    """Patch torch by the cast lists and return the handle that scales losses.

    A second call with the same arguments returns the same handle; with others the new handle replaces the old one. A
    call that fails leaves torch, and the handle before, as they were.

    Args:
        enabled: False takes an earlier call's patches away and returns a handle that does nothing.
        loss_scale: None is dynamic for fp16 and 1.0 for bf16. A number is static; ``"dynamic"`` or a `LossScaler`.
        enable_caching: Whether a parameter's cast is kept while the outermost module call runs.
        verbose: Log what is patched.
        allow_banned: Whether a banned function runs in fp32 with a warning, or raises.
        lists: A list set's name, a path, a mapping, or a sequence of these, on top of the project's own lists.
        device_type: Only tensors of this device type are cast. None is the current accelerator's, else ``"cpu"``.
        dtype: ``torch.float16`` or ``torch.bfloat16``. None is torch's own choice for the device type.
        rebind: Whether names that other modules took before (``from torch import matmul``) are rebound too.
        scope: ``"global"``, or ``"modules"`` for code that knows nothing of mixed precision: casts act within the calls
            of modules alone, whose outputs are fp32, and where an argument requires gradients.

    Raises:
        ListFileError: A list cannot be used.
        UsageError: An argument is wrong, or a region with a handle of its own is open.
        ValueError: The loss scale is no scale.
    """
    if not enabled:
        nothing = NoOpHandle()
        handles.put_base(nothing)
        return nothing
    if verbose:
        _show_log()
    settings = Settings.of(loss_scale, enable_caching, verbose, allow_banned, lists, device_type, dtype, rebind, scope)
    with handles.lock:
        base = handles.base
        if isinstance(base, Handle) and base.settings == settings:
            return base
        handle = Handle(settings)
        handles.put_base(handle)
        return handle


def _show_log() -> None:
    """Let ``verbose=True`` be seen in a program that has not set up logging."""
    logger = logging.getLogger("autoamp")
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)


def disable_casts() -> contextlib.AbstractContextManager[None]:
    """Turn casts off for a block, on this thread. Without an active handle it does nothing."""
    handle = handles.handle
    return handle.disable_casts() if handle is not None else contextlib.nullcontext()


def half_function(function: Any) -> Any:
    """Decorate a function: its floating arguments are cast to the half dtype, and what it calls follows the lists."""
    return handles.registry.decorate(function, CastPolicy.FP16)


def float_function(function: Any) -> Any:
    """Decorate a function: its floating arguments are cast to fp32, and nothing is cast within."""
    return handles.registry.decorate(function, CastPolicy.FP32)


def promote_function(function: Any) -> Any:
    """Decorate a function: its floating arguments are cast to the widest dtype among them."""
    return handles.registry.decorate(function, CastPolicy.PROMOTE)


def register_half_function(module: Any, name: str) -> None:
    """Put ``module.name`` under the `fp16` policy, now and at each later `init`. ValueError: no such name."""
    handles.register(module, name, CastPolicy.FP16)


def register_float_function(module: Any, name: str) -> None:
    """Put ``module.name`` under the `fp32` policy, now and at each later `init`. ValueError: no such name."""
    handles.register(module, name, CastPolicy.FP32)


def register_promote_function(module: Any, name: str) -> None:
    """Put ``module.name`` under the `promote` policy, now and at each later `init`. ValueError: no such name."""
    handles.register(module, name, CastPolicy.PROMOTE)


# -- regions --


class Region:
    """Patches for a block alone, on the thread that enters it. Made by `region()`; it can be entered again."""

    def __init__(self, enabled: bool, settings: Settings | None) -> None:
        self._enabled = enabled
        self._settings = settings
        self._handle: Handle | None = None
        self._entered = _Entered()

    def __enter__(self) -> Handle | NoOpHandle:
        with contextlib.ExitStack() as stack:
            handle = self._enter(stack)
            self._entered.stacks.append(stack.pop_all())
        return handle

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.stacks.pop().__exit__(*exc_info)

    def _enter(self, stack: contextlib.ExitStack) -> Handle | NoOpHandle:
        if not self._enabled:
            stack.enter_context(disable_casts())
            return handles.handle or NoOpHandle()
        handle = handles.enter(self._settings, self._own_handle)
        stack.callback(handles.leave, handle)
        stack.enter_context(handle.casts.switched(True, forced_off=False))
        return handle

    def _own_handle(self) -> Handle:
        # Kept from entry to entry, and with it the loss scale.
        if self._handle is None:
            self._handle = Handle(self._settings or Settings.of(), on=False)
        return self._handle


class _Entered(threading.local):
    """The blocks of a region that a thread is in: one region may serve several threads."""

    def __init__(self) -> None:
        self.stacks: list[contextlib.ExitStack] = []


def region(enabled: bool = True, loss_scale: Any = None, **settings: Any) -> Region:
    """Patch torch for a block alone: ``with autoamp.region(dtype=torch.bfloat16) as handle``.

    Args:
        enabled: False turns the active handle's casts off for the block.
        loss_scale: As for `init`.
        **settings: The other arguments of `init`. Without any, a handle that is active already serves.

    Only the thread that enters the block casts. The patches come and go with the block, which takes some ten
    milliseconds each time: around a whole training loop that is nothing, around each of its steps prefer `init`.
    """
    given = bool(settings) or loss_scale is not None
    return Region(enabled, Settings.of(loss_scale=loss_scale, **settings) if given else None)
