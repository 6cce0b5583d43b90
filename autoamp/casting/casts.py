"""Casting arguments: what is cast and to what, and each thread's switch.

What is cast: tensors of the handle's device type in fp16, bf16 or fp32, of a dense layout. Integers, bool, complex,
fp64, sparse tensors and tensors of other devices are left as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.casting.cache import CastCache
from autoamp.casting.casters import CASTABLE_DTYPES, build_caster, cast_call
from autoamp.casting.threads import Switches, ThreadState
from autoamp.tensors import CASTABLE_LAYOUTS, iter_tensors
from autoamp.torch_private import is_any_autocast_enabled

__all__ = ["Casts"]
"""Casts a sequence of arguments, however nested, into a new one; what needs no cast comes back as the same object.

``shares=False`` keeps an activation's cast from being handed out again, as for a value that is seen once.
"""


class Casts:
    """What casting needs to know, of one handle: the half dtype, the device type, each thread's switch, the cache.

    These cast everywhere, or with ``on=False`` in the threads and blocks alone that turn casts on.
    """

    def __init__(
        self, dtype: torch.dtype, device_type: str, *, enable_caching: bool = True, on: bool | None = True
    ) -> None:
        self.dtype = dtype
        self.device_type = device_type
        self.local = ThreadState()
        self.deviations = self.local.deviations
        # Until `open` lets replacements cast, no thread does.
        self.deviations.append(None)
        self._on = on
        self._open = False
        self.cache = CastCache(self.local, enable_caching)
        self.warned: set[str] = set()
        self.narrow = Tensor.half if dtype is torch.float16 else Tensor.bfloat16
        self.args_to_half = build_caster(dtype, self.narrow, device_type, self.local, self.cache)
        self.args_to_fp32 = build_caster(torch.float32, Tensor.float, device_type, self.local, None)

    def open(self) -> None:
        """Let the replacements cast, in the threads that are on by default."""
        if self._on and not self._open:
            self.deviations.pop()
        self._open = True
        # What turns casts on, such as a module's precision, must not do so in a thread that is off by default.
        self.local.set_default(self._on, forced_off=self._on is False)

    @property
    def on_by_default(self) -> bool:
        """Whether threads cast where no block says otherwise."""
        return self._on is not False

    @property
    def is_open(self) -> bool:
        """Whether replacements may cast at all."""
        return self._open

    def shut(self) -> None:
        """Make every replacement pass calls through, in all threads."""
        if self._on and self._open:
            self.deviations.append(None)
        self._open = False
        self.local.set_default(False, forced_off=True)
        self.cache.clear()

    def state(self) -> bool | None:
        """Tell whether this thread casts now; None where that is asked for each call."""
        on: bool = self.local.on
        return on

    def wants(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call with these arguments is to be cast."""
        return bool(self.local.on)

    def passing(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a replacement calls where `ThreadState.on` is false: here what it replaces."""
        return original

    def around_outermost(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands around a module's call that is within no other: here nothing does."""
        return call

    def builders(self) -> Sequence[tuple[Any, str, Callable[[Any], Any]]]:
        """Return what else is to be patched for these casts: owner, name and what builds the replacement."""
        return ()

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Let a closure, which an optimizer calls within its step, cast as around the step."""
        return self.switched(True)

    @contextlib.contextmanager
    def switched(self, on: bool | None, forced_off: bool | None = None) -> Iterator[None]:
        """Set this thread's switches for a block, as `ThreadState.set` does."""
        token = self.local.set(on, forced_off)
        try:
            yield
        finally:
            self.local.reset(token)

    def remembered(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> Callable[..., Any]:
        """Wrap a function so that it runs as this thread casts now, whenever and in whichever thread it is called.

        Args:
            function: What is to be called later.
            args: What it is called with, where that is known and may tell how it casts.
        """
        local, switches = self.local, self.switches(args)

        def run(*args: Any, **kwargs: Any) -> Any:
            token = local.set(*switches)
            try:
                return function(*args, **kwargs)
            finally:
                local.reset(token)

        return run

    def switches(self, args: Sequence[Any] = ()) -> Switches:
        """Return how this thread casts now, before a call with these arguments, for `ThreadState.set`."""
        return self.state(), self.local.forced_off

    def eligible(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is of a dtype, device type and layout that casts apply to."""
        return (
            tensor.dtype in CASTABLE_DTYPES
            and tensor.device.type == self.device_type
            and tensor.layout in CASTABLE_LAYOUTS
            and not self.autocast_rules()
        )

    def autocast_rules(self) -> bool:
        """Tell whether a torch.autocast region is in force here: then torch casts, and we step aside."""
        return is_any_autocast_enabled() and torch.is_autocast_enabled(self.device_type)

    def to_half(self, value: Any) -> Any:
        """Cast one value, however nested, to the half dtype."""
        return self.args_to_half((value,), False)[0]

    def to_fp32(self, value: Any) -> Any:
        """Cast one value, however nested, to fp32."""
        return self.args_to_fp32((value,), False)[0]

    def promote(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Cast the arguments of a call: floating tensors of several dtypes all go to fp32, the widest."""
        dtypes = {tensor.dtype for tensor in iter_tensors((args, kwargs)) if self.eligible(tensor)}
        return cast_call(self.args_to_fp32, args, kwargs) if len(dtypes) > 1 else (args, kwargs)
