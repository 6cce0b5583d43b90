"""The process's one active handle, and what is registered for all handles."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from autoamp.core.dtype_notes import add_dtype_note
from autoamp.core.handle import BaseHandle, Handle, NoOpHandle, runtime_of
from autoamp.core.registry import Registry
from autoamp.core.rules import CastPolicy
from autoamp.core.runtime import Runtime
from autoamp.core.settings import Settings
from autoamp.errors import UsageError

activated: list[Callable[[Any], object]] = []
"""Called with a handle whose patches were put in place: by `init`, `initialize` or a region that begins or ends."""


class ActiveHandles:
    """Which handle is active, since a process has one torch; and what was registered for all handles.

    ``init`` sets the base handle. Regions are above it, each with the handle that serves it: the base, or one of its
    own. While that is active, the handle below is suspended.

    Attributes:
        lock: Taken while handles come and go.
        registry: The functions that were decorated and registered.
        enabled, disabled: The classes of handles that are made: those of `autoamp` look on too.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.registry = Registry(self.lock)
        self.enabled: type[Handle] = Handle
        self.disabled: type[NoOpHandle] = NoOpHandle
        self._handle: Handle | None = None
        self._base: BaseHandle | None = None
        # In which the base handle was set.
        self._base_thread = threading.current_thread()
        self._open: list[tuple[Handle, int]] = []

    @property
    def handle(self) -> Handle | None:
        """The active handle, None where torch is not patched."""
        handle = self._handle
        return handle if handle is not None and handle.is_active() else None

    @property
    def base(self) -> BaseHandle | None:
        """The handle outside of regions: an active one, or the disabled one of ``enabled=False``; else None."""
        handle = self._base
        return handle if handle is not None and (handle.is_active() or not isinstance(handle, Handle)) else None

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
            before = self.handle or self.base
            self._switch(handle if isinstance(handle, Handle) else None)
            self._base, self._base_thread = handle, threading.current_thread()
            if before is not None:
                before.deactivate()

    @contextlib.contextmanager
    def region(self, settings: Settings | None, own: Callable[[], Handle]) -> Iterator[Handle]:
        """Open a region. Yields the handle that serves it: the active one if its settings fit, else ``own()``.

        Args:
            settings: Those of the region; None for any.
            own: Makes the region's own handle, or returns the one that it made before.

        Raises:
            UsageError: Another thread uses a handle with other settings.
        """
        thread = threading.get_ident()
        with self.lock:
            handle = self.handle
            if handle is None or (settings is not None and not self._fits(handle, settings, thread)):
                self._check_alone(handle, thread)
                handle = own()
                self._switch(handle)
            self._open.append((handle, thread))
        try:
            yield handle
        finally:
            with self.lock:
                # The latest one of this thread: regions of a handle may lie within one another.
                del self._open[-1 - self._open[::-1].index((handle, thread))]
                below = self._open[-1][0] if self._open else self._base
                if handle is self._handle and handle is not below:
                    # A handle that its owner deactivated stays so.
                    self._switch(below if isinstance(below, Handle) and not runtime_of(below).ended else None)

    def _fits(self, handle: Handle, settings: Settings, thread: int) -> bool:
        """Whether the active handle serves a region. On the thread of the handle all settings have to be the same."""
        if handle.settings == settings:
            return True
        return self._is_of_other_thread(handle, thread) and handle.settings.covers(settings)

    def _is_of_other_thread(self, handle: Handle | None, thread: int) -> bool:
        """Whether a handle is the base, and was set in another thread, which lives."""
        of_handle = self._base_thread
        return handle is not None and handle is self._base and of_handle.ident != thread and of_handle.is_alive()

    def _check_alone(self, handle: Handle | None, thread: int) -> None:
        """Raise UsageError if the active handle cannot be suspended, as another thread uses it."""
        if any(other != thread for _, other in self._open):
            raise UsageError(
                "a region with other settings is open in another thread, and torch can be patched in one way "
                "at a time; use the same settings in both, or one region after the other"
            )
        if handle is not None and self._is_of_other_thread(handle, thread):
            settings = handle.settings
            raise UsageError(
                "init() was called in another thread with other settings than this region's, and torch can be patched "
                f"in one way at a time; give the region those of the handle (dtype={settings.dtype}, "
                f"device_type={settings.device_type!r}, its lists, and nothing else), or none: autoamp.region()"
            )

    def _switch(self, handle: Handle | None) -> None:
        """Suspend the active handle and activate another. On an error nothing changes."""
        before = self.handle
        if before is not None:
            runtime_of(before).suspend()
        self._handle = None
        if handle is None:
            return
        try:
            self._activate(handle)
        except BaseException:
            runtime_of(handle).suspend()
            if before is not None:
                self._activate(before)
            raise

    def _activate(self, handle: Handle) -> None:
        # Set before the listeners are called, which look for it here.
        self._handle, run = handle, runtime_of(handle)
        run.casts.explain = lambda error: add_dtype_note(error, run)
        self.registry.use(run.casts)
        run.activate(self.registry.targets())
        for listener in activated.copy():
            listener(handle)

    def register(self, module: Any, name: str, policy: CastPolicy) -> None:
        """Put ``module.name`` under a policy, now and for handles to come."""
        with self.lock:
            target = self.registry.add(module, name, policy)
            if self.handle is not None:
                runtime_of(self.handle).patched.add(target)


handles = ActiveHandles()
put_handle = handles.put_base


def current_handle() -> Handle | None:
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
