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

from autoamp.casting import Casts
from autoamp.diagnostics.call_sites import CallSite, ModulePaths, user_frame
from autoamp.patching import mark, original_of
from autoamp.rules import CastPolicy, CastRule
from autoamp.torch_private import DispatchMode

__all__ = ["Call", "Observation", "Observer", "Op", "Watch", "operator_mode"]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A patched function.

    Attributes:
        name: Its dotted name, such as ``"torch.nn.functional.linear"``; one of several.
        rule: The rule that applies to it, with the list file and line.
        original: The function below the replacement.
        functional: For an in-place form the function that computes the same out of place, else None.
    """

    name: str
    rule: CastRule
    original: Any
    functional: Any = None

    @property
    def policy(self) -> CastPolicy:
        """What the rule does with the arguments."""
        return self.rule.policy


@dataclass(slots=True, eq=False)
class Call:
    """One call of a patched function. Use it only while the call runs.

    Attributes:
        op: The function.
        args, kwargs: Its arguments, before casts.
        casting: Whether casts are on for this call. They are off in ``optimizer.step()``, inside a composite function
            that runs in fp32, and in ``disable_casts``.
        outer: The call of a patched function around this one, in this thread; None for most.
        modules: The modules whose calls are around this one, outermost first.
        frame: The frame that makes the call; None once it has ended.
    """

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    casting: bool
    outer: Call | None
    modules: tuple[Module, ...]
    frame: types.FrameType | None
    _observation: Observation
    _site: CallSite | None = None

    @property
    def site(self) -> CallSite:
        """The module, file and line of the call. Takes some microseconds; read it while the call runs."""
        if self._site is None:
            self._site = self._observation.site_of(self.frame, self.modules)
        return self._site


class Observer:
    """Base class of observers of patched functions. A subclass overrides the methods that it needs.

    Methods run in the thread of the call, in several threads at the same time. Inside them casts are off and calls are
    not observed. An exception in one goes to the caller.
    """

    def before(self, call: Call) -> Any:
        """A call begins. The returned value is passed to `after` or `failed` as ``state``."""

    def after(self, call: Call, state: Any, result: Any) -> None:
        """A call returned ``result``."""

    def failed(self, call: Call, state: Any, error: BaseException) -> None:
        """A call raised ``error``."""

    def ended(self) -> None:
        """The observation ended. Called once, also when the handle is deactivated."""


def operator_mode(saw: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object]) -> Any:
    """Return a `TorchDispatchMode` that shows each operator of one thread; None where torch has no such modes.

    Args:
        saw: Called with the operator, its arguments and its result.
    """
    if DispatchMode is None:
        return None

    class Mode(DispatchMode):  # type: ignore[misc]
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            # torch.compile compiles as without it.
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            saw(func, args, kwargs or {}, result)
            return result

    return Mode()


class Watch:
    """A running observation. `stop`, or the end of a ``with`` statement, ends it."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop: Callable[[], None] | None = stop

    def stop(self) -> None:
        """Let the observer look on no more."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.stop()


class _Thread(threading.local):
    """What is going on in a thread.

    Attributes:
        modules: The modules that are being called, outermost first.
        call: The innermost call of a patched function.
        telling: Whether an observer is being told, so that what it calls is not told of.
    """

    modules: tuple[Module, ...] = ()
    call: Call | None = None
    telling = False


class Observation:
    """The observers of one handle, and the layer above replacements that tells them.

    Attributes:
        observers: Who is told, in this order before a call and in reverse after it.
        on_model: Called before each outermost module call; None where nobody asks.
    """

    def __init__(self, casts: Casts) -> None:
        self.observers: tuple[Observer, ...] = ()
        self.on_model: Callable[[], object] | None = None
        self._casts = casts
        self._thread = _Thread()
        self._paths = ModulePaths()
        self._lock = threading.Lock()

    def add(self, observer: Observer) -> None:
        """Tell one more observer from now on."""
        with self._lock:
            self.observers = (*self.observers, observer)

    def remove(self, observer: Observer) -> bool:
        """Tell an observer no more. Return False where it was not told anyway."""
        with self._lock:
            left = tuple(other for other in self.observers if other is not observer)
            found = len(left) < len(self.observers)
            self.observers = left
        if found:
            observer.ended()
        return found

    def end(self) -> None:
        """Remove all observers."""
        for observer in self.observers:
            self.remove(observer)

    def site_here(self) -> CallSite:
        """Return where this thread is: for modes, which see ops that are in no list."""
        return self.site_of(sys._getframe(1), self._thread.modules)

    def site_of(self, frame: types.FrameType | None, modules: tuple[Module, ...]) -> CallSite:
        """Return the site for the innermost of these modules, and the first frame of a user from this one outwards."""
        path = self._paths.find(modules)
        frame = user_frame(frame)
        return CallSite(*path, *((None, None) if frame is None else (frame.f_code.co_filename, frame.f_lineno)))

    @property
    def call(self) -> Call | None:
        """The innermost call of a patched function that this thread is in."""
        return self._thread.call

    @property
    def telling(self) -> bool:
        """Whether an observer of this thread is being told."""
        return self._thread.telling

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """Tell observers of nothing that this thread calls within a ``with`` statement."""
        thread = self._thread
        before, thread.telling = thread.telling, True
        try:
            yield
        finally:
            thread.telling = before

    def watched(self, replacement: Any, op: Op) -> Any:
        """Return a replacement of the same kind that tells the observers of each call.

        Args:
            replacement: A function, staticmethod or classmethod that `autoamp.ops.build_replacement` made.
            op: What it stands for.
        """
        if isinstance(replacement, (staticmethod, classmethod)):
            return type(replacement)(self.watched(replacement.__func__, op))
        compiling, thread = torch.compiler.is_compiling, self._thread

        def run(*args: Any, **kwargs: Any) -> Any:
            if compiling() or thread.telling or not self.observers:
                return replacement(*args, **kwargs)
            observers = self.observers
            outer = thread.call
            casting = self._casts.wants(args, kwargs)
            call = Call(op, args, kwargs, casting, outer, thread.modules, sys._getframe(1), self)
            states: list[tuple[Observer, Any]] = []
            self.quietly(lambda: states.extend([(observer, observer.before(call)) for observer in observers]))
            thread.call = call
            try:
                result = replacement(*args, **kwargs)
            except BaseException as error:
                # Else the name of the exception would be a circle of frames.
                failure = error
                self.quietly(lambda: [observer.failed(call, state, failure) for observer, state in reversed(states)])
                call.frame = None
                raise
            finally:
                thread.call = outer
            self.quietly(lambda: [observer.after(call, state, result) for observer, state in reversed(states)])
            call.frame = None
            return result

        watching: Any = functools.update_wrapper(run, replacement, updated=())
        watching.__wrapped__ = getattr(replacement, "__wrapped__", replacement)
        return watching

    def quietly(self, tell: Callable[[], Any]) -> None:
        """Call what looks at tensors, with casts off and unobserved."""
        thread, local = self._thread, self._casts.local
        thread.telling = True
        token = local.set(False)
        try:
            tell()
        finally:
            local.reset(token)
            thread.telling = False

    def watched_modules(self, replacement: types.FunctionType) -> Any:
        """Return a replacement of ``torch.nn.Module.__call__`` that notes which modules are being called."""
        compiling, thread, observation = torch.compiler.is_compiling, self._thread, self

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

        watching: Any = functools.update_wrapper(call, replacement, updated=())
        watching.__wrapped__ = original_of(replacement)
        return mark(watching, original_of(replacement))
