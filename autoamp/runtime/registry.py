"""Policies for functions that no list names: decorators, and registrations by module and name."""

from __future__ import annotations

import difflib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

from autoamp.casting import Casts
from autoamp.errors import ListFileError, PatchError, TargetError, warn_user
from autoamp.ops import Target, build_replacement, target_at
from autoamp.patching import check_writable
from autoamp.rules import CastPolicy, CastRule, Origin

__all__ = ["Registry"]


class _Decorated:
    """A decorated function, and how it runs under the handle that it was last built for."""

    def __init__(self, function: Any, policy: CastPolicy) -> None:
        self.function = function
        self.policy = policy
        # One tuple, set in one step: a thread never reads the casts of one handle and the replacement of another.
        self.built: tuple[Casts | None, Any] = (None, None)

    def build(self, casts: Casts) -> Any:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        replacement = build_replacement(
            self.function, self.policy, casts, module=str(self.function.__module__), qualname=name
        )
        self.built = (casts, replacement)
        return replacement


class Registry:
    """The decorated functions and the registrations of this process. They outlast handles.

    Args:
        active_casts: Returns the active handle's casts, None where nothing is to be cast.

    Attributes:
        rules: The registrations, by the ``id`` of the module and the name in it.
    """

    def __init__(self, active_casts: Callable[[], Casts | None]) -> None:
        self._active_casts = active_casts
        self._lock = threading.Lock()
        self._decorated: weakref.WeakSet[_Decorated] = weakref.WeakSet()
        self.rules: dict[tuple[int, str], tuple[Any, CastRule]] = {}

    def decorate(self, function: Any, policy: CastPolicy) -> Any:
        """Wrap a function so that each call follows the handle that is active then.

        Args:
            function: A function, builtin, bound method, callable object, staticmethod or classmethod.
            policy: What happens to its arguments.

        Raises:
            TypeError: This is no function, or a class, generator function or coroutine function.
        """
        if isinstance(function, (staticmethod, classmethod)):
            return type(function)(self.decorate(function.__func__, policy))
        if not callable(function):
            raise TypeError(f"{function!r} is not callable; a {policy.value} decorator takes a function")
        if isinstance(function, type):
            raise TypeError(f"{function.__name__} is a class; decorate its method, such as forward")
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"{function!r} runs after the call has returned; decorate the functions that it calls")
        decorated, active_casts = _Decorated(function, policy), self._active_casts
        with self._lock:
            self._decorated.add(decorated)
        casts_now = active_casts()
        if casts_now is not None:
            decorated.build(casts_now)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            casts = active_casts()
            if casts is None:
                return function(*args, **kwargs)
            known, replacement = decorated.built
            if known is not casts:
                replacement = decorated.build(casts)
            return replacement(*args, **kwargs)

        return wrapper

    def prepare(self, casts: Casts) -> None:
        """Build all decorated functions for a handle: a compiler that meets a call first could not trace that."""
        with self._lock:
            known = list(self._decorated)
        for decorated in known:
            decorated.build(casts)

    def add(self, module: Any, name: str, policy: CastPolicy) -> Target:
        """Register ``module.name``, in place of an earlier registration of the same.

        Raises:
            TargetError: There is no such name, or it is nothing that can be patched.
        """
        where = getattr(module, "__name__", type(module).__name__)
        if not isinstance(name, str) or not hasattr(module, name):
            near = difflib.get_close_matches(str(name), dir(module), n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "register a name that is there"
            raise TargetError(f"no function named {name!r} in {where!r}; {hint}")
        rule = CastRule(f"{where}.{name}", policy, Origin(f"register_{policy.value}_function", None, False))
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
