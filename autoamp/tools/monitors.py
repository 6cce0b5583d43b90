"""Scalars for TensorBoard and Weights & Biases, and schedulers and averages that follow optimizer steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Module

from autoamp.core import Listener, Listeners, Step
from autoamp.errors import UsageError, kind_of


class Followers(Listener):
    """Functions that are called after each step of an optimizer, when the weights have been updated.

    Args:
        listeners: Those of the handle. This is one while there are functions.
    """

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = listeners
        # Functions that were added together, with whether they are called after skipped steps too.
        self._entries: list[tuple[Sequence[Callable[[], object]], bool]] = []

    def add(self, *calls: Callable[[], object], after_skips: bool) -> Callable[[], None]:
        """Call functions after each step from now on; return a function that ends it.

        Args:
            calls: The functions, in this order.
            after_skips: Whether they are called after skipped steps too.
        """
        entry = calls, after_skips
        self._entries.append(entry)
        self._listeners.add(self)

        def end() -> None:
            self._entries = [other for other in self._entries if other is not entry]
            if not self._entries:
                self._listeners.remove(self)

        return end

    def follow(self, followers: Sequence[Any]) -> Callable[[], None]:
        """Step these after each step that was not skipped; return a function that ends it.

        Raises:
            UsageError: One of them cannot be called without arguments, nor has such a ``step()`` or ``update()``.
        """
        return self.add(*map(_stepping, followers), after_skips=False)

    def step_ended(self, step: Step) -> None:
        """Call the functions. Whether the step was skipped is asked where a function depends on it; that may wait."""
        for calls, after_skips in self._entries:
            if after_skips or not step.skipped:
                for call in calls:
                    call()


def _stepping(follower: Any) -> Callable[[], object]:
    """Return what steps a follower; see `Followers.follow`."""
    methods = (getattr(follower, name, None) for name in ("step", "update"))
    method = next(filter(callable, methods), follower)
    try:
        if method is follower and isinstance(follower, Module):
            raise TypeError("calling a module computes its output")
        inspect.signature(method).bind()
    except TypeError as error:
        raise UsageError(
            f"follow() cannot step {kind_of(follower)} ({error}); give an object whose step() or update() "
            "takes no arguments, or a function such as lambda: averaged.update_parameters(model)"
        ) from None
    except ValueError:
        # Functions in C may have no signature.
        pass
    return method


def write_scalars(writer: Any, values: Mapping[str, float], step: int) -> None:
    """Write numbers to a `SummaryWriter` (``add_scalar``), or to a run of Weights & Biases (``log``).

    Args:
        writer: Either of them.
        values: Numbers by name; they are written as ``autoamp/NAME``.
        step: The number of the step.
    """
    named = {f"autoamp/{name}": value for name, value in values.items()}
    if callable(getattr(writer, "add_scalar", None)):
        for name, value in named.items():
            writer.add_scalar(name, value, step)
    else:
        writer.log(named)
