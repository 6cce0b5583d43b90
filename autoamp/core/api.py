"""`init()`, `region()`, the functions that act on whichever handle is active, and which one that is.

A process has one active handle. What is registered for all handles is here too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy
import torch

from autoamp.core.handle import BaseHandle, Handle, NoOpHandle, Runtime, runtime_of
from autoamp.core.loss_scale import LossScaler
from autoamp.core.policies import Registry, check_decorated
from autoamp.core.rules import CastPolicy
from autoamp.core.settings import OnNonfinite, Scope, Settings, check_device
from autoamp.errors import UsageError, kind_of, warn_user
from autoamp.half_units import falls_back_to_fp32, half_dtype
from autoamp.tensors import default_device_type
from autoamp.torch_private import disable_in_dynamo

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

    def set_current(self, handle: BaseHandle | None) -> None:
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
        self.registry.use(run.casts)
        run.patched.patch(run.settings, self.registry.targets())
        run.ended = False
        for listener in activated.copy():
            listener(handle)

    def register(self, module: Any, name: str, policy: CastPolicy) -> None:
        """Put ``module.name`` under a policy, now and for handles to come."""
        with self.lock:
            target = self.registry.add(module, name, policy)
            if self.handle is not None:
                runtime_of(self.handle).patched.add(target)


handles = ActiveHandles()
set_handle = handles.set_current


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


H = TypeVar("H", bound=BaseHandle)
_Function = TypeVar("_Function", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")


def init(
    enabled: bool = True,
    loss_scale: float | Literal["dynamic"] | LossScaler | None = None,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = True,
    *,
    lists: Any = None,
    device_type: str | None = None,
    dtype: torch.dtype | Literal["fp16", "float16", "bf16", "bfloat16"] | None = None,
    rebind: bool = True,
    scope: Scope = "global",
    trace_overflow: bool = False,
    capsule: str | Path | None = None,
    on_nonfinite: OnNonfinite = "warn",
) -> BaseHandle:
    """Patch torch by the cast lists and return the handle that scales losses.

    A second call with the same arguments returns the same handle. With other arguments the new handle replaces the old
    one. A call that raises an error changes nothing.

    Args:
        enabled: False removes the patches of an earlier call and returns a handle that does nothing.
        loss_scale: A number is static; ``"dynamic"`` or a `LossScaler`. None is dynamic for fp16 and 1.0 for bf16.
        enable_caching: Whether a parameter's cast is cached while the outermost module call runs.
        verbose: Whether to log the number of patches.
        allow_banned: True: a banned function runs in fp32 with a warning. False: it raises.
        lists: A list set's name, a path, a mapping, or a sequence of these. They take precedence over the project's
            lists.
        device_type: Only tensors of this device type are cast. None is that of the current accelerator, else ``"cpu"``.
        dtype: ``torch.float16`` or ``torch.bfloat16``, or its name: ``"fp16"`` or ``"bf16"``. None is torch's default
            half dtype for the device type. If the device has no units for that, nothing is cast, as with
            ``enabled=False``, and the log says so.
        rebind: Whether to rebind names that other modules imported earlier (``from torch import matmul``).
        scope: ``"global"``, or ``"modules"`` for code that knows nothing of mixed precision. Ops inside a module call
            are cast, the outputs of the outermost call are fp32, and elsewhere an op is cast only if an argument is in
            the half dtype.
        trace_overflow: Explain each skipped step, in `Handle.last_overflow`; see docs/diagnostics.md. It changes no
            result, and recorded steps take longer.
        capsule: A folder. The first step of each cause of inf or nan is written to a file there, for
            ``autoamp replay``, with the weights and inputs of the step. Implies ``trace_overflow``.
        on_nonfinite: What to do with a step that no loss scale guards and whose gradients hold inf or nan: ``"warn"``
            once, ``"raise"`` `NonFiniteGradientsError` before it, or ``"skip"`` it. The last two wait for a GPU at each
            step.

    Raises:
        ListFileError: A list cannot be used.
        UsageError: An argument is invalid, or a region with its own handle is open.
        LossScaleError: The loss scale is invalid.
    """
    _check_enabled(enabled, "init")
    settings = _settings_of(
        lists, device_type, dtype, loss_scale=loss_scale, enable_caching=enable_caching, verbose=verbose,
        allow_banned=allow_banned, rebind=rebind, scope=scope, trace_overflow=trace_overflow, capsule=capsule,
        on_nonfinite=on_nonfinite,
    ) if enabled else None  # fmt: skip
    with handles.lock:
        base = handles.base
        if isinstance(base, Handle) and base.settings == settings:
            return base
        cast = [] if not isinstance(base, Handle) else [type(one).__name__ for one in runtime_of(base).models.halves]
        handle = handles.disabled() if settings is None else handles.enabled(settings)
        handles.set_current(handle)
        if cast:
            warn_user(
                f"init() ends what initialize() set up: {', '.join(cast)} is fp32 again, with the values of its master "
                "weights; call one of the two"
            )
        return handle


def _settings_of(
    lists: Any = None, device_type: str | None = None, dtype: torch.dtype | str | None = None, **others: Any
) -> Settings | None:
    """Return the settings that arguments of `init` come to; None if the device falls back to fp32."""
    settings = Settings.from_arguments(lists, device_type, dtype, **others)
    check_device(settings.device_type)
    return None if falls_back_to_fp32(half_dtype(dtype), settings.device_type) else settings


def _check_enabled(enabled: Any, caller: str) -> None:
    """Raise UsageError for what is no switch: a string, or a model that was meant for `initialize`."""
    if not isinstance(enabled, (bool, int, numpy.bool_, type(None))):
        shown = kind_of(enabled) if isinstance(enabled, torch.nn.Module) else repr(enabled)
        setting = f"device_type={enabled!r}" if enabled in ("cuda", "cpu", "mps", "xpu") else "dtype=torch.float16"
        decorates = f"a decorator has parentheses, @autoamp.{caller}(); " if inspect.isroutine(enabled) else ""
        raise UsageError(
            f"enabled={shown} is neither True nor False; {decorates}settings are given by name, as in "
            f"autoamp.{caller}({setting}), and models and optimizers to autoamp.initialize(model, optimizer)"
        )


def disable_casts() -> contextlib.AbstractContextManager[None]:
    """Turn casts off inside a ``with`` statement, in this thread. Without an active handle it does nothing."""
    handle = handles.handle
    return handle.disable_casts() if handle is not None else contextlib.nullcontext()


class Region(contextlib.ContextDecorator, Generic[H]):
    """A context manager and decorator: torch is patched within. Made by `region()`; it can be entered again."""

    def __init__(self, enabled: bool, settings: Settings | None) -> None:
        self._enabled = enabled
        self._settings = settings
        # By thread, one block for each time that the thread has entered the region.
        self._entered: dict[int, list[contextlib.ExitStack]] = {}

    def __call__(self, func: _Function) -> _Function:
        """Decorate a function: each call runs within the region."""
        check_decorated(func, "region")
        return super().__call__(func)  # type: ignore[type-var]

    @disable_in_dynamo
    def __enter__(self) -> H:
        needs_own = self._settings is None and handles.handle is None
        with contextlib.ExitStack() as block:
            if not self._enabled or (needs_own and falls_back_to_fp32(None, default_device_type())):
                block.enter_context(disable_casts())
                handle: BaseHandle | None = handles.handle
                if handle is None:
                    handle = handles.disabled()
                    block.callback(handle.deactivate)
            else:
                handle = block.enter_context(handles.region(self._settings, lambda: self._own_handle))
                # Without a scope of its own it goes over that of the handle around it.
                on = None if self._settings is not None and self._settings.scope == "modules" else True
                block.enter_context(runtime_of(handle).casts.switched(on, forced_off=False))
            self._entered.setdefault(threading.get_ident(), []).append(block.pop_all())
        return handle  # type: ignore[return-value]

    @disable_in_dynamo
    def __exit__(self, *exc_info: Any) -> None:
        self._entered[threading.get_ident()].pop().__exit__(*exc_info)

    @functools.cached_property
    def _own_handle(self) -> Handle:
        """The region's own handle, kept from entry to entry, and with it the loss scale."""
        return handles.enabled(self._settings or Settings.from_arguments(), on=False)


def region(enabled: bool = True, loss_scale: Any = None, **settings: Any) -> Region[BaseHandle]:
    """Patch torch inside a ``with`` statement only: ``with autoamp.region(dtype=torch.bfloat16) as handle``.

    Also a decorator, ``@autoamp.region()``, of a function that runs within it.

    A region with settings casts only in the thread that enters it; with ``scope="modules"`` it casts within modules
    alone, in all threads. A region without settings casts everything, whatever the scope of the active handle.

    On another thread than that of `init` the active handle serves the region, and scales losses there.

    Entering and leaving patch and restore torch, which takes about ten milliseconds each. Use a region around a whole
    training loop; around each step prefer `init`.

    Args:
        enabled: False turns the casts of the active handle off inside the region.
        loss_scale: As for `init`.
        **settings: The other arguments of `init`. Without any, the region uses the active handle if there is one.

    Raises:
        ListFileError: A list cannot be used.
        UsageError: An argument is wrong. On entry: a region with other settings is open in another thread, or `init`
            was called there with other settings than this region asks for.
        LossScaleError: The loss scale is invalid.
    """
    _check_enabled(enabled, "region")
    inspect.signature(init).bind(enabled, loss_scale, **settings)
    if not enabled or (loss_scale is None and not settings):
        return Region(bool(enabled), None)
    chosen = _settings_of(loss_scale=loss_scale, **settings)
    return Region(chosen is not None, chosen)


def half_function(function: _Function) -> _Function:
    """Decorate a function: its floating arguments are cast to the half dtype. Ops inside it follow the lists.

    Args:
        function: The function or method.

    Raises:
        TypeError: ``function`` is not a function, for example a class, or it runs later, as a generator does.
    """
    return handles.registry.decorate(function, CastPolicy.FP16)


def float_function(function: _Function) -> _Function:
    """Decorate a function: its floating arguments are cast to fp32. No op inside it is cast.

    Args:
        function: The function or method.

    Raises:
        TypeError: As for `half_function`.
    """
    return handles.registry.decorate(function, CastPolicy.FP32)


def promote_function(function: _Function) -> _Function:
    """Decorate a function: its floating arguments are cast to the widest dtype among them.

    Args:
        function: The function or method.

    Raises:
        TypeError: As for `half_function`.
    """
    return handles.registry.decorate(function, CastPolicy.PROMOTE)


def register_half_function(module: Any, name: str) -> None:
    """Put ``module.name`` under the `fp16` policy, now and at each later `init`.

    Args:
        module: A module or class.
        name: The name of a function or method in it.

    Raises:
        TargetError: ``module`` has no such name, or it cannot be patched.
    """
    handles.register(module, name, CastPolicy.FP16)


def register_float_function(module: Any, name: str) -> None:
    """Put ``module.name`` under the `fp32` policy, now and at each later `init`.

    Args:
        module: A module or class.
        name: The name of a function or method in it.

    Raises:
        TargetError: ``module`` has no such name, or it cannot be patched.
    """
    handles.register(module, name, CastPolicy.FP32)


def register_promote_function(module: Any, name: str) -> None:
    """Put ``module.name`` under the `promote` policy, now and at each later `init`.

    Args:
        module: A module or class.
        name: The name of a function or method in it.

    Raises:
        TargetError: ``module`` has no such name, or it cannot be patched.
    """
    handles.register(module, name, CastPolicy.PROMOTE)
