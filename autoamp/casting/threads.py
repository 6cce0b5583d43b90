"""What differs by thread: whether casts are on, by two switches, and the casts that the running module call keeps.

The switches are set and put back by tokens. What is made and read of the kept casts is in `cache`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["KeptCast", "Switches", "ThreadState", "Token"]

KeptCast = tuple[Tensor, Tensor, int, int, int, Any]
"""A tensor and its cast, the versions of both, the tensor's address when the cast was made, and one thing more.

Of a parameter that is its storage, referenced so that its address is not used again: a storage that a later ``.data =``
brings in has another one. Of an activation it is whether it was a leaf, and the stream in use.
"""

Switches = tuple[Any, bool]
"""The values of `ThreadSwitches.on` and `ThreadSwitches.forced_off`, as `ThreadState.set` takes them."""

Token = tuple[Any, bool | None]
"""What a thread itself had set both switches to; None for a switch that it had not set, so that the default applied."""


class ThreadSwitches:
    """The two switches of one thread.

    Class attributes are the defaults of a thread that sets nothing itself: no casts, until `Casts.open`.

    A plain object: what compiled code sets on an instance of a subclass of `threading.local`, Dynamo of torch 2.13
    writes to a dict that threads do not read, and its guards read that dict.

    Attributes:
        on: True where the thread casts, False where it does not, None outside of modules' calls where these turn casts
            on.
        forced_off: Whether casts are off whatever is asked for within, as in a ``disable_casts``.
    """

    on: Any = False
    forced_off = True


class ThreadState(threading.local):
    """What differs by thread, of one handle.

    Attributes:
        switches: Whether this thread casts.
        entries: The casts that the running module call keeps, by ``id(parameter)``: None for a parameter that was used
            once, whose cast is kept from the second use on. The whole is None outside of module calls.
        last: The last activation that was cast, with its cast.
        regions: The disabled torch.autocast regions that this thread is in, outermost first, each with the token of
            the switches that it set.
    """

    _make_switches: type[ThreadSwitches]
    entries: dict[int, KeptCast | None] | None = None
    last: KeptCast | None = None
    regions: tuple[tuple[Any, Token], ...] = ()

    def __new__(cls) -> ThreadState:
        """Make an instance of a class of its own, whose attributes are one handle's in every thread."""
        switches = type(ThreadSwitches.__name__, (ThreadSwitches,), {})
        return super().__new__(type(cls.__name__, (cls,), {"_make_switches": switches}))

    def __init__(self) -> None:
        """Make the switches of a thread: `threading.local` calls this in each."""
        self.switches = self._make_switches()

    def set_default(self, on: Any, *, forced_off: bool) -> None:
        """Set the switches of all threads that have set nothing themselves."""
        cls = self._make_switches
        cls.on, cls.forced_off = on, forced_off

    def set(self, on: Any, forced_off: bool | None = None) -> Token:
        """Set this thread's switches, and return the token by which `reset` puts back what was there.

        Args:
            on: None for the default. Where ``forced_off`` is not given and the thread's is True, this becomes False.
            forced_off: None leaves it as it is.
        """
        own = vars(self.switches)
        token = own.get("on"), own.get("forced_off")
        if forced_off is None:
            forced_off, on = token[1], False if self.switches.forced_off else on
        self._put(on, forced_off)
        return token

    def reset(self, token: Token) -> None:
        """Put back the switches that a `set` replaced. Tokens are given back in reverse order."""
        self._put(*token)

    def _put(self, on: Any, forced_off: bool | None) -> None:
        own = vars(self.switches)
        for name, value in (("on", on), ("forced_off", forced_off)):
            if value is None:
                own.pop(name, None)
            else:
                own[name] = value

    def bound(self, function: Callable[..., Any], on: Any, forced_off: bool | None = None) -> Callable[..., Any]:
        """Return a function that calls another with these switches, in whichever thread and whenever it is called."""

        def run(*args: Any, **kwargs: Any) -> Any:
            token = self.set(on, forced_off)
            try:
                return function(*args, **kwargs)
            finally:
                self.reset(token)

        return run
