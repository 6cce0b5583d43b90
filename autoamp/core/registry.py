"""Policies for functions that no list names: decorators, and registrations by module and name."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from autoamp.core.casts import CastState
from autoamp.core.list_files import did_you_mean
from autoamp.core.patches import check_writable
from autoamp.core.policies import build_replacement
from autoamp.core.rules import CastPolicy, CastRule, RuleSource
from autoamp.core.targets import Target, target_at
from autoamp.errors import ListFileError, PatchError, TargetError, warn_user

# A decorator returns what it was given: its parameters, overloads and descriptors stay known to type checkers.
_Function = TypeVar("_Function", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")


class _Decorated:
    """A decorated function, and ``current``, what a call of it runs.

    That is the replacement for the handle that was activated last. It passes calls through while that handle is not
    active.
    """

    def __init__(self, function: Any, policy: CastPolicy) -> None:
        self._function = function
        self._policy = policy
        self.current = function

    def build(self, casts: CastState) -> None:
        function = self._function
        name = getattr(function, "__qualname__", type(function).__name__)
        self.current = build_replacement(function, self._policy, casts, module=str(function.__module__), qualname=name)


def check_decorated(function: Any, decorator: str) -> None:
    """Raise TypeError for what no decorator can take: a class, or a function that runs later, as a generator does."""
    if not callable(function):
        raise TypeError(f"{function!r} is not callable; a {decorator} decorator takes a function")
    if isinstance(function, type):
        raise TypeError(f"{function.__name__} is a class; decorate its method, such as forward")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError(f"{function!r} runs after the call has returned; decorate the functions that it calls")


class Registry:
    """The decorated functions and the registrations of this process. They outlast handles.

    Args:
        lock: Held while handles come and go.

    Attributes:
        rules: The registrations, by the ``id`` of the module and the name in it.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._decorated: weakref.WeakSet[_Decorated] = weakref.WeakSet()
        self._casts: CastState | None = None
        self.rules: dict[tuple[int, str], tuple[Any, CastRule]] = {}

    def decorate(self, function: _Function, policy: CastPolicy) -> _Function:
        """Wrap a function so that each call follows the handle that is active then.

        Args:
            function: A function, builtin, bound method, callable object, staticmethod or classmethod.
            policy: What happens to its arguments.

        Raises:
            TypeError: This is no function, or a class, generator function or coroutine function.
        """
        if isinstance(function, (staticmethod, classmethod)):
            return type(function)(self.decorate(function.__func__, policy))
        check_decorated(function, policy.value)
        decorated = _Decorated(function, policy)
        with self._lock:
            self._decorated.add(decorated)
            if self._casts is not None:
                decorated.build(self._casts)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return decorated.current(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    def use(self, casts: CastState) -> None:
        """Let all decorated functions follow a handle's casts from now on."""
        self._casts = casts
        for decorated in list(self._decorated):
            decorated.build(casts)

    def add(self, module: Any, name: str, policy: CastPolicy) -> Target:
        """Register ``module.name``, in place of an earlier registration of the same.

        Raises:
            TargetError: There is no such name, or it is nothing that can be patched.
        """
        where = getattr(module, "__name__", type(module).__name__)
        if not isinstance(name, str) or not hasattr(module, name):
            raise TargetError(f"no function named {name!r} in {where!r}; {did_you_mean(name, dir(module))}")
        rule = CastRule(f"{where}.{name}", policy, RuleSource(f"register_{policy.value}_function", None, False))
        try:
            target = target_at(module, name, rule)
            check_writable(target.parent, target.attribute)
        except (ListFileError, PatchError) as error:
            raise TargetError(f"{rule.target!r} cannot be registered: {error}") from error
        self.rules.pop((id(module), name), None)
        self.rules[id(module), name] = (module, rule)
        return target

    def targets(self) -> tuple[Target, ...]:
        """Return what is registered, in order, but for names that are gone: those are warned of."""
        found = []
        for (_, name), (module, rule) in self.rules.items():
            try:
                found.append(target_at(module, name, rule))
            except (ListFileError, AttributeError) as error:
                warn_user(f"the registration of {rule.target!r} has no effect: {error}")
        return tuple(found)
