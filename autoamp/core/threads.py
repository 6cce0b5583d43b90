"""What differs by thread: whether casts are on, by two switches, and the casts that the running module call keeps.

The switches are set and put back by tokens. What is made and read of the kept casts is in `cache`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from autoamp.torch_private import mark_constant, trace_as, tracing_context

KeptCast = tuple[Tensor, Tensor, int, int, int, Any]
"""A tensor and its cast, the versions of both, the tensor's address when the cast was made, and one thing more.

Of a parameter that is its storage, referenced so that its address is not used again: a storage that a later ``.data =``
brings in has another one. Of an activation it is whether it was a leaf, and the stream in use.
"""

HALF_MODEL = "half model"
"""What `ThreadMode.on` is inside half models: there the rules for half models act, and not those of the handle."""

BY_DEFAULT = "by default"
"""What `ThreadMode.forced_off` is where casts are off but inside the models of `initialize`, which turn them on."""

Token = tuple[Any, Any]
"""What a thread itself had set both switches to; None for a switch that it had not set, so that the default applied."""


class ThreadMode:
    """The two switches of one thread.

    Class attributes are the defaults of a thread that sets nothing itself: no casts, until `CastState.open`.

    A plain object: what compiled code sets on an instance of a subclass of `threading.local`, Dynamo of torch 2.13
    writes to a dict that threads do not read, and its guards read that dict.

    Attributes:
        on: True where the thread casts, False where it does not, None outside of modules' calls where these turn casts
            on, `HALF_MODEL` inside half models.
        forced_off: Whether casts are off whatever is asked for within, as in a ``disable_casts``; or `BY_DEFAULT`.
    """

    on: Any = False
    forced_off: Any = True


class TracedMode:
    """The two switches as code finds them that Dynamo traces, which reads them here.

    Traced code that sets them has decided all casts once it is compiled, so nothing is set when it runs. A side effect
    would also break the graph: a checkpoint's function may have none. So Dynamo calls the methods below while it
    traces, and takes what they return for constants. It keeps such a constant as a global of the traced module, by the
    method's name, which must not be one of the program's. A trace that Dynamo gives up and begins anew has a new
    context, and with it no switches that are set.

    Attributes:
        mode: This object, as `ThreadState.mode` is what other code reads.
    """

    def __init__(self, local: ThreadState) -> None:
        self._local = local
        self._set: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any]]] = weakref.WeakKeyDictionary()
        self.mode = self

    @property
    def on(self) -> Any:
        """`ThreadMode.on`. Compiled code guards on what its thread had when it was called."""
        return self.autoamp_now(0, self._local.mode.on)

    @property
    def forced_off(self) -> Any:
        """`ThreadMode.forced_off`, guarded alike."""
        return self.autoamp_now(1, self._local.mode.forced_off)

    @mark_constant
    def autoamp_now(self, index: int, at_call: Any) -> Any:
        """Return the first or second of the switches that are set, ``at_call`` where none are."""
        within = self._within()
        return within[-1][index] if within else at_call

    @mark_constant
    def autoamp_set(self, on: Any, forced_off: Any) -> None:
        """Set the switches of the code that is traced from now on."""
        self._within().append((on, forced_off))

    @mark_constant
    def autoamp_reset(self) -> None:
        """Put back what the last `set` replaced."""
        del self._within()[-1:]

    def _within(self) -> list[tuple[Any, Any]]:
        context = tracing_context()
        return [] if context is None else self._set.setdefault(context, [])


def _set_traced(state: ThreadState, on: Any, forced_off: Any = None) -> None:
    traced = state.traced
    if forced_off is None:
        forced_off = traced.forced_off
        on = False if forced_off else on
    traced.autoamp_set(on, forced_off)


class ThreadState(threading.local):
    """What differs by thread, of one handle.

    Attributes:
        mode: The switches of this thread.
        traced: The switches of code that Dynamo traces, whichever thread it traces in.
        param_casts: The casts that the running module call keeps, by ``id(parameter)``: None for a parameter that was
            used once, whose cast is kept from the second use on. The whole is None outside of module calls.
        last_activation: The last activation that was cast, with its cast.
        bare_calls: How many calls of modules without parameters this thread is in, in which casts are not decided yet.
        regions: The disabled torch.autocast regions that this thread is in, outermost first, each with the token of
            the switches that it set.
    """

    _make_mode: type[ThreadMode]
    traced: TracedMode
    param_casts: dict[int, KeptCast | None] | None = None
    last_activation: KeptCast | None = None
    bare_calls = 0
    regions: tuple[tuple[Any, Token | None], ...] = ()

    def __new__(cls) -> ThreadState:
        """Make an instance of a class of its own, whose attributes are one handle's in every thread."""
        mode = type(ThreadMode.__name__, (ThreadMode,), {})
        own: Any = type(cls.__name__, (cls,), {"_make_mode": mode})
        state: ThreadState = super().__new__(own)
        own.traced = TracedMode(state)
        return state

    def __init__(self) -> None:
        """Make the switches of a thread: `threading.local` calls this in each."""
        self.mode = self._make_mode()

    @trace_as(lambda state: state.traced)
    def now(self) -> ThreadMode | TracedMode:
        """Return the switches as the code that calls this finds them, whether it runs or Dynamo traces it."""
        return self.mode

    def is_forced_off(self) -> bool:
        """Whether casts are off in models too."""
        return self.now().forced_off is True

    def set_default(self, on: Any, *, forced_off: Any) -> None:
        """Set the switches of all threads that have set nothing themselves."""
        cls = self._make_mode
        cls.on, cls.forced_off = on, forced_off

    @trace_as(_set_traced)
    def set(self, on: Any, forced_off: Any = None) -> Token:
        """Set this thread's switches, and return the token by which `reset` puts back what was there.

        Args:
            on: None for the default. Where ``forced_off`` is not given and the thread's is True, this becomes False.
            forced_off: None leaves it as it is.
        """
        own = vars(self.mode)
        token = own.get("on"), own.get("forced_off")
        if forced_off is None:
            forced_off, on = token[1], False if self.mode.forced_off else on
        self._put(on, forced_off)
        return token

    @trace_as(lambda state, token: state.traced.autoamp_reset())
    def reset(self, token: Token) -> None:
        """Put back the switches that a `set` replaced. Tokens are given back in reverse order."""
        self._put(*token)

    def _put(self, on: Any, forced_off: Any) -> None:
        own = vars(self.mode)
        for name, value in (("on", on), ("forced_off", forced_off)):
            if value is None:
                own.pop(name, None)
            else:
                own[name] = value

    def with_mode(self, function: Callable[..., Any], on: Any, forced_off: Any = None) -> Callable[..., Any]:
        """Return a function that calls another with these switches, in whichever thread and whenever it is called."""

        def run(*args: Any, **kwargs: Any) -> Any:
            token = self.set(on, forced_off)
            try:
                return function(*args, **kwargs)
            finally:
                self.reset(token)

        return run
