"""`region()`: a handle that is active in a `with` statement or a function."""

from __future__ import annotations

import contextlib
import inspect
import threading
from typing import Any

from autoamp.half_units import falls_back_to_fp32
from autoamp.runtime.active import handles
from autoamp.runtime.api import check_enabled, disable_casts, init
from autoamp.runtime.handle import BaseHandle, Handle, NoOpHandle, runtime_of
from autoamp.runtime.settings import Settings, check_device
from autoamp.tensors import default_device_type

__all__ = ["Region", "region"]


class Region:
    """A context manager and decorator: torch is patched within. Made by `region()`; it can be entered again."""

    def __init__(self, enabled: bool, settings: Settings | None) -> None:
        self._enabled = enabled
        self._settings = settings
        self._handle: Handle | None = None
        # How to leave it, by thread: once for each time that the thread has entered it.
        self._entered: dict[int, list[contextlib.ExitStack]] = {}

    def __enter__(self) -> BaseHandle:
        with contextlib.ExitStack() as stack:
            handle = self._enter(stack)
            self._entered.setdefault(threading.get_ident(), []).append(stack.pop_all())
        return handle

    def __exit__(self, *exc_info: Any) -> None:
        self._entered[threading.get_ident()].pop().__exit__(*exc_info)

    def _enter(self, stack: contextlib.ExitStack) -> BaseHandle:
        needs_own = self._settings is None and handles.handle is None
        if not self._enabled or (needs_own and falls_back_to_fp32(None, default_device_type())):
            stack.enter_context(disable_casts())
            return handles.handle or NoOpHandle()
        handle = handles.enter(self._settings, self._own_handle)
        stack.callback(handles.leave, handle)
        stack.enter_context(runtime_of(handle).casts.switched(True, forced_off=False))
        return handle

    def _own_handle(self) -> Handle:
        # Kept from entry to entry, and with it the loss scale.
        if self._handle is None:
            self._handle = Handle(self._settings or Settings.of(), on=False)
        return self._handle


def region(enabled: bool = True, loss_scale: Any = None, **settings: Any) -> Region:
    """Patch torch inside a ``with`` statement only: ``with autoamp.region(dtype=torch.bfloat16) as handle``.

    Only the thread that enters the region casts. Entering and leaving patch and restore torch, which takes about ten
    milliseconds each. Use a region around a whole training loop; around each step prefer `init`.

    Args:
        enabled: False turns the casts of the active handle off inside the region.
        loss_scale: As for `init`.
        **settings: The other arguments of `init`. Without any, the region uses the active handle if there is one.

    Raises:
        ListFileError: A list cannot be used.
        UsageError: An argument is wrong. On entry: a region with other settings is open in another thread.
        LossScaleError: The loss scale is invalid.
    """
    check_enabled(enabled, "region")
    inspect.signature(init).bind(enabled, loss_scale, **settings)
    given = bool(settings) or loss_scale is not None
    chosen = Settings.of(loss_scale=loss_scale, **settings) if given else None
    if enabled and chosen is not None:
        check_device(chosen.device_type)
        enabled = not falls_back_to_fp32(settings.get("dtype"), chosen.device_type)
    return Region(enabled, chosen)
