"""Observers: their methods are called before and after each call of a function in the cast lists.

Without an observer this costs nothing. The first observer installs the replacements again, each in a layer that calls
the observers. When the last observer stops, the layers are removed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn import Module

from autoamp.core import HALF_MODEL, CastState, Listener, Listeners, Target
from autoamp.errors import UsageError, kind_of
from autoamp.tools.call_sites import CallSite, ModulePaths, user_frame
from autoamp.torch_private import OperatorMode, trace_as, traced_in_place_of, without_operator_modes


@dataclass(eq=False)
class Call:
    """One call of a patched function. Use it only while the call runs.

    Attributes:
        op: The function: its dotted ``name``, its ``rule`` with the list file and line, and the ``original`` below.
        args, kwargs: Its arguments, before casts.
        casting: Whether casts are on for this call. They are off in ``optimizer.step()``, inside a composite function
            that runs in fp32, and in ``disable_casts``.
        outer: The call of a patched function around this one, in this thread; None for most.
        modules: The modules whose calls are around this one, outermost first.
        frame: The frame that makes the call.
    """

    op: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    casting: bool
    outer: Call | None
    modules: tuple[Module, ...]
    frame: types.FrameType
    _observation: Observation

    @functools.cached_property
    def site(self) -> CallSite:
        """The module, file and line of the call. Takes some microseconds; read it while the call runs."""
        return self._observation.site_of(self.frame, self.modules)


class Observer:
    """Base class of observers of patched functions. A subclass overrides the methods that it needs.

    Methods run in the thread of the call, in several threads at the same time. Inside them casts are off and calls are
    not observed. An exception in one goes to the caller.
    """

    def before(self, call: Call) -> Any:
        """A call begins. The returned value is passed to `after` or `failed` as ``state``."""

    def after(self, call: Call, state: Any, result: Any) -> None:
        """A call returned.

        Args:
            call: The call.
            state: What `before` returned for it.
            result: What the function returned: tensors, or nested containers of them.
        """

    def failed(self, call: Call, state: Any, error: BaseException) -> None:
        """A call raised an exception, which goes on to the caller.

        Args:
            call: The call.
            state: What `before` returned for it.
            error: The exception.
        """

    def ended(self) -> None:
        """The observation ended. Called once, also when the handle is deactivated."""


class Watch:
    """A running observation. `stop`, or the end of a ``with`` statement, ends it."""

    def __init__(self, stop: Callable[[], object] | None) -> None:
        self._stop = stop

    @property
    def active(self) -> bool:
        """Whether it has not ended."""
        return self._stop is not None

    def stop(self) -> None:
        """End the observation. Does nothing the second time."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.stop()


class _Thread(threading.local):
    """The calls that run in a thread.

    Attributes:
        modules: The modules whose calls are running, outermost first.
        call: The innermost running call of a patched function.
        only: The observers that calls are reported to: none for those that an observer makes. None means all.
    """

    modules: tuple[Module, ...] = ()
    call: Call | None = None
    only: tuple[Observer, ...] | None = None


class Observation(Listener):
    """The observers of one handle, and the layer above replacements that calls them.

    Args:
        casts: How the handle casts.
        listeners: Those of the handle. This is one while there are observers.
        patch_anew: Installs the replacements again. Called when the first observer begins and when the last one ends.

    Attributes:
        casts: As given.
        observers: The observers, in the order in which their `before` is called. `after` is called in reverse.
        here: What runs in the current thread: its innermost ``call`` of a patched function, and its ``modules``.
        on_model: Called before each outermost module call; None for nothing.
    """

    def __init__(self, casts: CastState, listeners: Listeners, patch_anew: Callable[[], object]) -> None:
        self.casts = casts
        self.observers: tuple[Observer, ...] = ()
        self.here = _Thread()
        self.on_model: Callable[[], object] | None = None
        self._listeners = listeners
        self._patch_anew = patch_anew
        self._lock = threading.Lock()

    @functools.cached_property
    def _paths(self) -> ModulePaths:
        return ModulePaths()

    def observe(self, observer: Observer) -> Watch:
        """Report calls to an observer until the returned object ends it; see `autoamp.Handle.observe`."""
        if not isinstance(observer, Observer):
            raise UsageError(f"observe() takes an autoamp.tools.Observer, not {kind_of(observer)}")
        with self._lock:
            before = self.observers
            self.observers = (*before, observer)
        if not before:
            self._listeners.add(self)
            self._patch_anew()
        return Watch(lambda: self.remove(observer))

    def remove(self, observer: Observer) -> None:
        """Report calls to an observer no more."""
        with self._lock:
            before = self.observers
            left = self.observers = tuple(other for other in before if other is not observer)
        if len(left) < len(before):
            observer.ended()
            if not left:
                self._listeners.remove(self)
                self._patch_anew()

    def end(self) -> None:
        """Remove all observers."""
        for observer in self.observers:
            self.remove(observer)

    def site_here(self) -> CallSite:
        """Return the site at which this thread is, for operators that no patched function called."""
        return self.site_of(sys._getframe(1), self.here.modules)

    def site_of(self, frame: types.FrameType | None, modules: tuple[Module, ...]) -> CallSite:
        """Return the site of the innermost module, and of the first frame of the program.

        Args:
            frame: Where the search for a frame of the program begins, outwards; None for no line.
            modules: The modules whose calls run, the outermost first.
        """
        frame = user_frame(frame)
        line = (None, None) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        return CallSite(*self._paths.find(modules), *line)

    @contextlib.contextmanager
    def only(self, *observers: Observer) -> Iterator[None]:
        """Within a ``with`` statement, report calls of this thread to these observers alone; without any, to none."""
        before, self.here.only = self.here.only, observers
        try:
            yield
        finally:
            self.here.only = before

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Within a ``with`` statement, cast nothing in this thread, and report no call of it."""
        with self.casts.switched(False), self.only():
            yield

    def op_layer(self, replacement: Any, op: Target, in_half_models: bool = False) -> Any:
        """Return a replacement of the same kind that reports each call to the observers.

        Args:
            replacement: A function, staticmethod or classmethod that `autoamp.core.build_replacement` made.
            op: The function that it replaces.
            in_half_models: Whether its rule is one for half models: inside these it is reported, and nowhere else.
        """
        if isinstance(replacement, (staticmethod, classmethod)):
            return type(replacement)(self.op_layer(replacement.__func__, op, in_half_models))
        compiling, thread = torch.compiler.is_compiling, self.here

        def run(*args: Any, **kwargs: Any) -> Any:
            if compiling() or not (observers := self.observers if thread.only is None else thread.only):
                return replacement(*args, **kwargs)
            if (self.casts.thread.mode.on == HALF_MODEL) is not in_half_models:
                return replacement(*args, **kwargs)
            outer = thread.call
            casting = in_half_models or self.casts.wants(args, kwargs)
            call = Call(op, args, kwargs, casting, outer, thread.modules, sys._getframe(1), self)
            with self.quietly():
                states = [(observer, observer.before(call)) for observer in observers]
            thread.call = call
            try:
                result = replacement(*args, **kwargs)
            except BaseException as error:
                with self.quietly():
                    for observer, state in reversed(states):
                        observer.failed(call, state, error)
                raise
            finally:
                thread.call = outer
            with self.quietly():
                for observer, state in reversed(states):
                    observer.after(call, state, result)
            return result

        watching: Any = functools.update_wrapper(run, replacement, updated=())
        watching.__wrapped__ = getattr(replacement, "__wrapped__", replacement)
        return trace_as(traced_in_place_of(replacement))(watching)

    @contextlib.contextmanager
    def export_begun(self) -> Iterator[None]:
        """See no operators while a graph of a model is made: the modes that do spoil it."""
        with without_operator_modes():
            yield

    def module_layer(self, replacement: Any) -> Any:
        """Return a replacement of ``torch.nn.Module.__call__`` that keeps the running module calls of each thread."""
        compiling, thread, observation = torch.compiler.is_compiling, self.here, self

        def call(self: Module, *args: Any, **kwargs: Any) -> Any:
            if compiling():
                return replacement(self, *args, **kwargs)
            before = thread.modules
            if not before and observation.on_model is not None:
                observation.on_model()
            thread.modules = (*before, self)
            try:
                return replacement(self, *args, **kwargs)
            finally:
                thread.modules = before

        return call


class OperatorObserver(Observer):
    """An observer that, inside a ``with`` statement, also sees each operator of the thread, listed or not.

    The operators come from a `TorchDispatchMode` below torch's autocast. It sees nothing of compiled code.

    Args:
        observation: The observers of the handle.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        here, observer = self._observation.here, self

        class Mode(OperatorMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                if here.only is None or observer in here.only:
                    observer.saw(func, args, kwargs or {}, result)
                return result

        self._stack.enter_context(self._observation.observe(self))
        self._stack.enter_context(Mode())
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.close()

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> object:
        """An operator of the program returned. A subclass overrides this.

        Args:
            func: The operator, a `torch._ops.OpOverload`.
            args: Its positional arguments.
            kwargs: Its named arguments.
            result: What it returned: tensors, or nested containers of them.
        """
