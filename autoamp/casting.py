"""Casting arguments: what is cast and to what, each thread's switch, and the cache of parameter casts.

What is cast: tensors of the handle's device type in fp16, bf16 or fp32, of a dense layout. Integers, bool, complex,
fp64, sparse tensors and tensors of other devices are left as they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

from autoamp.tensors import CASTABLE_LAYOUTS, HALF_DTYPES, PLAIN_TYPES, iter_tensors, map_tensors

__all__ = ["CastCache", "Casts", "SparseArgument", "put_back"]

_FLOATS = frozenset({*HALF_DTYPES, torch.float32})


class SparseArgument(Exception):
    """Raised while arguments are cast, where one is sparse: the whole call is to go through as it came."""


class _ThreadState(threading.local):
    """What differs by thread. The class attributes are the defaults of a thread that was never seen."""

    on = True
    forced_off = False
    entries: dict[int, _Entry] | None = None
    # The disabled torch.autocast regions around, each with the block that turns casts off for it.
    regions: tuple[tuple[Any, contextlib.AbstractContextManager[None]], ...] = ()


class _Entry(NamedTuple):
    """A cast, and what its parameter was when it was made.

    The storage is held so that its address stays taken: a later one that a ``.data =`` brings in lies elsewhere.
    """

    parameter: Parameter
    cast: Tensor
    version: int
    address: int
    storage: torch.UntypedStorage


class _Pin:
    """A parameter that somebody promised not to write to, its cast once there is one, and how many blocks promised."""

    __slots__ = ("blocks", "cast")

    def __init__(self) -> None:
        self.blocks = 0
        self.cast: Tensor | None = None


class CastCache:
    """Casts of parameters, kept while the outermost module call runs.

    A cast is stale as soon as its parameter changes. Identity, version and address tell of most changes; nothing tells
    of a write through ``.data``, numpy or a flat buffer. Such writes happen between module calls, so no cast outlives
    the outermost one, with or without gradients. A module that writes so between two uses of one weight within its own
    call needs ``init(enable_caching=False)``. ``pin`` is the explicit promise that the weights stay.
    """

    def __init__(self, local: _ThreadState, enabled: bool = True) -> None:
        self.enabled = enabled
        self._local = local
        self._pins: dict[int, _Pin] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def pin(self, parameters: list[Parameter]) -> Iterator[None]:
        """Keep the casts of these parameters, where no gradient is asked of them, until the block ends."""
        with self._lock:
            for parameter in parameters:
                self._pins.setdefault(id(parameter), _Pin()).blocks += 1
        try:
            yield
        finally:
            with self._lock:
                for parameter in parameters:
                    pin = self._pins[id(parameter)]
                    pin.blocks -= 1
                    if not pin.blocks:
                        del self._pins[id(parameter)]

    def clear(self) -> None:
        """Drop the casts of this thread's running module call."""
        if self._local.entries is not None:
            self._local.entries = {}

    def __len__(self) -> int:
        return len(self._local.entries or ()) + sum(pin.cast is not None for pin in self._pins.values())

    def cast(self, parameter: Parameter, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``convert(parameter)``, an earlier result where it still holds."""
        needs_grad = parameter.requires_grad and torch.is_grad_enabled()
        if self._pins and not needs_grad:
            pin = self._pins.get(id(parameter))
            if pin is not None:
                return _pinned_cast(pin, parameter, convert)
        entries = self._local.entries
        if entries is None:
            return convert(parameter)
        entry = entries.get(id(parameter))
        if entry is not None:
            _, cast, version, address, _ = entry
            if (
                cast.requires_grad == needs_grad
                and parameter._version == version
                and parameter.data_ptr() == address
                and (not cast.is_inference() or torch.is_inference_mode_enabled())
            ):
                return cast
        cast = convert(parameter)
        # An inference tensor has no version to hold a cast by; a wrapper of torch.func is dead outside its transform.
        if cast is not parameter and not parameter.is_inference() and not is_functorch_wrapped_tensor(cast):
            entries[id(parameter)] = _Entry(
                parameter, cast, parameter._version, parameter.data_ptr(), parameter.untyped_storage()
            )
        return cast


def _pinned_cast(pin: _Pin, parameter: Parameter, convert: Callable[[Tensor], Tensor]) -> Tensor:
    cast = pin.cast
    if cast is None:
        # Made outside inference mode, so that it serves inside and outside.
        with torch.inference_mode(False), torch.no_grad():
            cast = convert(parameter)
        if not is_functorch_wrapped_tensor(cast):
            pin.cast = cast
    return cast


class Casts:
    """What casting needs to know, of one handle: the half dtype, the device type, each thread's switch, the cache."""

    def __init__(self, dtype: torch.dtype, device_type: str, *, enable_caching: bool = True, on: bool = True) -> None:
        self.dtype = dtype
        self.device_type = device_type
        # A class of its own, so that its class attributes are this handle's defaults in every thread.
        self.local: _ThreadState = type("_ThreadState", (_ThreadState,), {})()
        # Not empty while some thread may cast otherwise than most. Where it is empty no replacement need ask which
        # thread it is in; and compiled code, which cannot watch a thread's state, watches this.
        self.blocks: list[None] = [None]
        self._on = on
        self._open = False
        self.cache = CastCache(self.local, enable_caching)
        self.warned: set[str] = set()
        self.to_half = self._caster(dtype, Tensor.half if dtype is torch.float16 else Tensor.bfloat16, cached=True)
        self.to_fp32 = self._caster(torch.float32, Tensor.float, cached=False)

    def open(self) -> None:
        """Let the replacements cast, in the threads that are on by default."""
        if self._on and not self._open:
            self.blocks.pop()
        self._open = True
        type(self.local).on = self._on
        # A block that turns casts on, such as a module's precision, must not do so in a thread that is off by default.
        type(self.local).forced_off = not self._on

    def shut(self) -> None:
        """Make every replacement pass calls through, in all threads."""
        if self._on and self._open:
            self.blocks.append(None)
        self._open = False
        type(self.local).on = False
        type(self.local).forced_off = True
        self.cache.clear()

    @contextlib.contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Turn this thread's casts on or off for a block. ``on`` yields to a ``disable_casts`` around it."""
        local = self.local
        own = vars(local)
        before = own.get("on")
        self.blocks.append(None)
        local.on = on and not local.forced_off
        try:
            yield
        finally:
            put_back(own, "on", before)
            self.blocks.pop()

    def disabled(self) -> contextlib.AbstractContextManager[None]:
        """Turn this thread's casts off for a block, whatever is within."""
        return self._forced(off=True)

    def enabled(self) -> contextlib.AbstractContextManager[None]:
        """Turn this thread's casts on for a block, also within a ``disable_casts``."""
        return self._forced(off=False)

    @contextlib.contextmanager
    def _forced(self, off: bool) -> Iterator[None]:
        own = vars(self.local)
        before = own.get("forced_off")
        self.local.forced_off = off
        try:
            with self.switched(not off):
                yield
        finally:
            put_back(own, "forced_off", before)

    def remembered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that it runs as this thread casts now, whenever and in whichever thread it is called."""
        local, blocks = self.local, self.blocks
        on, forced_off = local.on, local.forced_off

        def run(*args: Any, **kwargs: Any) -> Any:
            own = vars(local)
            before = own.get("on"), own.get("forced_off")
            blocks.append(None)
            own["on"], own["forced_off"] = on, forced_off
            try:
                return function(*args, **kwargs)
            finally:
                put_back(own, "on", before[0])
                put_back(own, "forced_off", before[1])
                blocks.pop()

        return run

    def eligible(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is of a dtype, device type and layout that casts apply to."""
        return (
            tensor.dtype in _FLOATS
            and tensor.device.type == self.device_type
            and tensor.layout in CASTABLE_LAYOUTS
            and not self.autocast_rules()
        )

    def autocast_rules(self) -> bool:
        """Tell whether a torch.autocast region is in force here: then torch casts, and we step aside."""
        return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(self.device_type)

    def promote(self, args: Any) -> Any:
        """Cast a whole argument list: floating tensors of several dtypes all go to fp32, the widest."""
        dtypes = {tensor.dtype for tensor in iter_tensors(args) if self.eligible(tensor)}
        return map_tensors(args, self.to_fp32) if len(dtypes) > 1 else args

    def _caster(
        self, target: torch.dtype, convert: Callable[[Tensor], Tensor], *, cached: bool
    ) -> Callable[[Any], Any]:
        sources = _FLOATS - {target}
        cache, autocast_rules, on_device = self.cache, self.autocast_rules, _on_device(self.device_type)
        compiling, any_autocast = torch.compiler.is_dynamo_compiling, torch._C._is_any_autocast_enabled
        strided, plain = torch.strided, PLAIN_TYPES

        def cast_tensor(tensor: Tensor) -> Tensor:
            if tensor.dtype not in sources or not on_device(tensor) or (any_autocast() and autocast_rules()):
                return tensor
            if tensor.layout is not strided and tensor.layout not in CASTABLE_LAYOUTS:
                raise SparseArgument
            return convert(tensor)

        def cast_nested(tensor: Tensor) -> Tensor:
            return cast(tensor) if type(tensor) is Parameter else cast_tensor(tensor)

        def cast(value: Any) -> Any:
            kind = type(value)
            if kind is Tensor:
                return value if value.dtype is target else cast_tensor(value)
            if kind in plain:
                return value
            if kind is Parameter:
                if value.dtype is target:
                    return value
                # A compiler traces the cast itself, and shares it within the graph. An autocast region casts itself.
                if cached and not compiling() and not any_autocast():
                    return cache.cast(value, cast_tensor)
                return cast_tensor(value)
            return map_tensors(value, cast_nested)

        return cast


def _on_device(device_type: str) -> Callable[[Tensor], bool]:
    """Return a test of a tensor's device type: where torch has an attribute for it, that costs a third."""
    if device_type == "cuda":
        return lambda tensor: tensor.is_cuda
    if device_type == "cpu":
        return lambda tensor: tensor.is_cpu
    return lambda tensor: tensor.device.type == device_type


def put_back(own: dict[str, Any], name: str, before: Any) -> None:
    """Give a thread's own state what it had; None is nothing of its own, so that the default holds again."""
    if before is None:
        own.pop(name, None)
    else:
        own[name] = before
