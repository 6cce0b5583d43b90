"""The process's one active handle, and what is registered for all handles."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from autoamp.casting import Casts
from autoamp.errors import UsageError
from autoamp.rules import CastPolicy
from autoamp.runtime.handle import BaseHandle, Handle, runtime_of
from autoamp.runtime.registry import Registry
from autoamp.runtime.runtime import Runtime
from autoamp.runtime.settings import Settings
from autoamp.stepping import announce_disabled, announce_enabled

__all__ = [
    "ActiveHandles",
    "current_handle",
    "current_runtime",
    "handles",
    "needed_handle",
    "put_handle",
]


class ActiveHandles:
    """Which handle is active, since torch's namespace is one to a process; and what was registered for all handles.

    ``init`` sets the base handle. Each open region is above it, with the handle that serves it: the base, or one of
    its own, for whose time the handle below is suspended.

    Attributes:
        lock: Taken while handles come and go.
        registry: The functions that were decorated and registered.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.registry = Registry(self.casts)
        self._handle: Handle | None = None
        self._base: BaseHandle | None = None
        self._open: list[tuple[Handle, int]] = []
        self._suspended: set[Handle] = set()

    @property
    def handle(self) -> Handle | None:
        """The active handle, None where torch is not patched."""
        handle = self._handle
        return handle if handle is not None and handle.is_active() else None

    @property
    def base(self) -> BaseHandle | None:
        """The handle outside of regions: an active one, or the disabled one of ``enabled=False``; else None."""
        handle = self._base
        return handle if handle is not None and (handle.is_active() or not handle.settings.enabled) else None

    def casts(self) -> Casts | None:
        """Return the casts of the active handle, None where they are off."""
        casts = None if self.handle is None else runtime_of(self.handle).casts
        return casts if casts is not None and casts.local.on is not False else None

    def put_base(self, handle: BaseHandle | None) -> None:
        """Make ``handle`` the one outside of regions, and deactivate the one before. On an error nothing changes.

        Args:
            handle: None for no handle.

        Raises:
            UsageError: A region with a handle of its own is open.
        """
        with self.lock:
            if any(serving is not self._base for serving, _ in self._open):
                raise UsageError("torch cannot be patched again while a region is open; leave the region's block first")
            before = self.handle
            self._switch(handle if isinstance(handle, Handle) else None)
            self._base = handle
            if handle is not None:
                (announce_enabled if isinstance(handle, Handle) else announce_disabled)()
            if before is not None:
                self._suspended.discard(before)
                before.deactivate()

    def enter(self, settings: Settings | None, own: Callable[[], Handle]) -> Handle:
        """Open a region and return the handle that serves it: the active one where its settings fit, else ``own()``.

        Args:
            settings: Those of the region; None for any.
            own: Makes the region's own handle, or returns the one that it made before.

        Raises:
            UsageError: A region with other settings is open in another thread.
        """
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
        """Close this thread's latest region of ``handle``; with the last one the handle before becomes active again."""
        with self.lock:
            at = max(i for i, entry in enumerate(self._open) if entry == (handle, threading.get_ident()))
            del self._open[at]
            below = self._open[-1][0] if self._open else self._base
            # One that its owner deactivated is not ours to bring back.
            below = below if isinstance(below, Handle) and not runtime_of(below).ended else None
            if handle is self._handle and handle is not below:
                self._switch(below if below in self._suspended else None)
                self._suspended.discard(handle)

    def _switch(self, handle: Handle | None) -> None:
        """Suspend the active handle and activate another. On an error nothing changes."""
        before = self.handle
        if before is not None:
            runtime_of(before).suspend()
        # Set before `activate`, whose listeners look for it here.
        self._handle = handle
        try:
            if handle is not None:
                self.registry.prepare(runtime_of(handle).casts)
                runtime_of(handle).activate(self.registry.targets())
        except BaseException:
            self._handle = before
            if before is not None:
                runtime_of(before).activate(self.registry.targets())
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
                runtime_of(self.handle).patched.add(target)


handles = ActiveHandles()


put_handle = handles.put_base


def current_handle() -> BaseHandle | None:
    """Return the active handle, None where torch is not patched."""
    return handles.handle


def current_runtime() -> Runtime | None:
    """Return what the active handle drives, None where torch is not patched."""
    handle = handles.handle
    return None if handle is None else runtime_of(handle)


def needed_handle(caller: str) -> BaseHandle:
    """Return what scales losses now: the active handle, or the disabled one after ``enabled=False``.

    Raises:
        UsageError: Neither `initialize` nor `init` was called. The message begins with the name of the caller.
    """
    handle = handles.handle or handles.base
    if handle is None:
        raise UsageError(
            f"{caller}() needs a handle; call autoamp.initialize(model, optimizer) or autoamp.init() first"
        )
    return handle
