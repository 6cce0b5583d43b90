"""Whether casts are on in a thread: two switches, set and put back by tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["ThreadState"]


Entry = tuple[Parameter, Tensor, int, int, int, torch.UntypedStorage]

Shared = tuple[Tensor, Tensor, int, int, int, bool, Any]

Switches = tuple[Any, bool]

Token = tuple[Any, bool | None]


class ThreadState(threading.local):
    """What differs by thread, of one handle. Class attributes are the defaults of a thread that sets nothing itself.

    Attributes:
        on: Whether the thread casts. Where that is still to be asked, by `Casts.state` or for each call, it is None or
            something else that is false, so that a replacement need look no closer.
        forced_off: Whether casts are off whatever is asked for within, as in a ``disable_casts``.
        deviations: One for each `set` of any thread that is not yet put back. While there is none all threads cast, so
            that no replacement need ask which it is in; and compiled code, which cannot watch a thread's state, watches
            this.
        constructing: Whether a module's constructor has begun outside of modules' calls, as far as anybody has looked.
        entries: The casts of parameters that the running module call keeps; None outside of module calls.
        last: The cast of the last activation.
        regions: The disabled torch.autocast regions around, each with the token of the switches that it set.
    """

    deviations: list[None]
    on: Any = True
    forced_off = False
    constructing = False
    entries: dict[int, Entry | None] | None = None
    last: Shared | None = None
    regions: tuple[tuple[Any, Token], ...] = ()

    def __new__(cls) -> ThreadState:
        """Make an instance of a class of its own, whose attributes are one handle's defaults in every thread."""
        return super().__new__(type(cls.__name__, (cls,), {"deviations": []}))

    def set_default(self, on: Any, *, forced_off: bool) -> None:
        """Set the switches of all threads that have set nothing themselves."""
        cls = type(self)
        cls.on, cls.forced_off = on, forced_off

    def set(self, on: Any, forced_off: bool | None = None) -> Token:
        """Set this thread's switches, and return what `reset` takes to put back what was there.

        Args:
            on: None for the default. It is False all the same where ``forced_off`` holds and is not given.
            forced_off: None leaves it as it is.
        """
        own = vars(self)
        token = own.get("on"), own.get("forced_off")
        self.deviations.append(None)
        if forced_off is not None:
            own["forced_off"] = forced_off
        elif self.forced_off:
            on = False
        if on is None:
            own.pop("on", None)
        else:
            own["on"] = on
        return token

    def reset(self, token: Token) -> None:
        """Put back the switches that a `set` replaced."""
        own = vars(self)
        on, forced_off = token
        if on is None:
            own.pop("on", None)
        else:
            own["on"] = on
        if forced_off is None:
            own.pop("forced_off", None)
        else:
            own["forced_off"] = forced_off
        self.deviations.pop()

    def within_disabled(self) -> bool:
        """Tell whether a ``disable_casts`` is around, in this thread."""
        return bool(vars(self).get("forced_off"))

    def with_casts_off(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another with casts off in this thread."""
        deviations = self.deviations

        def run(*args: Any, **kwargs: Any) -> Any:
            if deviations and self.on is False:
                # Nothing to switch, and nothing for compiled code to note.
                return function(*args, **kwargs)
            # `set` and `reset` written out, which saves two calls: this is the hot path of the losses.
            own = vars(self)
            before = own.get("on")
            deviations.append(None)
            own["on"] = False
            try:
                return function(*args, **kwargs)
            finally:
                if before is None:
                    own.pop("on", None)
                else:
                    own["on"] = before
                deviations.pop()

        return run
