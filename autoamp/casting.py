"""Casting arguments: what is cast and to what, each thread's switch, and the cache of parameter casts.

What is cast: tensors of the handle's device type in fp16, bf16 or fp32, of a dense layout. Integers, bool, complex,
fp64, sparse tensors and tensors of other devices are left as they are.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
    entries: dict[int, _Entry | None] | None = None
    last: _Shared | None = None
    # The disabled torch.autocast regions around, each with the block that turns casts off for it.
    regions: tuple[tuple[Any, contextlib.AbstractContextManager[None]], ...] = ()


_Entry = tuple[Parameter, Tensor, int, int, torch.UntypedStorage]
"""A parameter and its cast, and the parameter's version, address and storage when it was made.

The storage is held so that its address stays taken: a later one that a ``.data =`` brings in lies elsewhere.
"""

_Shared = tuple[Tensor, Tensor, int, int, Any]
"""The tensor that was cast last, its cast, and its version, address and stream then."""


class _Pin:
    """A parameter that somebody promised not to write to, how many blocks did, its cast, its layer's `PinnedLayer`."""

    __slots__ = ("blocks", "cast", "layer")

    def __init__(self) -> None:
        self.blocks = 0
        self.cast: Tensor | None = None
        self.layer: Any = None


class CastCache:
    """Casts of parameters, kept while the outermost module call runs.

    A cast is stale as soon as its parameter changes. Identity, version and address tell of most changes; nothing tells
    of a write through ``.data``, numpy or a flat buffer. Such writes happen between module calls, so no cast outlives
    the outermost one, with or without gradients. A module that writes so between two uses of one weight within its own
    call needs ``init(enable_caching=False)``. ``pin`` is the explicit promise that the weights stay.

    Attributes:
        enabled: Whether module calls keep casts. An entry of theirs that is None is a parameter that was cast once.
        pins: By ``id(parameter)`` those that somebody promised not to write to.

    The cast of the last activation is kept as well, until the next one is cast: query, key and value share it.
    """

    def __init__(self, local: _ThreadState, enabled: bool = True) -> None:
        self.enabled = enabled
        self._local = local
        self.pins: dict[int, _Pin] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def pin(self, parameters: list[Parameter]) -> Iterator[None]:
        """Keep the casts of these parameters, where no gradient is asked of them, until the block ends."""
        with self._lock:
            for parameter in parameters:
                self.pins.setdefault(id(parameter), _Pin()).blocks += 1
        try:
            yield
        finally:
            with self._lock:
                for parameter in parameters:
                    pin = self.pins[id(parameter)]
                    pin.blocks -= 1
                    if not pin.blocks:
                        del self.pins[id(parameter)]
                for pin in self.pins.values():
                    pin.layer = None  # Its bias may be pinned no longer.

    def clear(self) -> None:
        """Drop the casts of this thread's running module call."""
        if self._local.entries is not None:
            self._local.entries = {}
            self._local.last = None

    def __len__(self) -> int:
        held = sum(entry is not None for entry in (self._local.entries or {}).values())
        return held + sum(pin.cast is not None or pin.layer is not None for pin in self.pins.values())

    def cast(self, parameter: Parameter, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``convert(parameter)``, an earlier result where it still holds."""
        grad = torch.is_grad_enabled()
        if self.pins and not (grad and parameter.requires_grad):
            pin = self.pins.get(id(parameter))
            if pin is not None:
                return pin.cast if pin.cast is not None else _pinned_cast(pin, parameter, convert)
        entries = self._local.entries
        if entries is None:
            return convert(parameter)
        entry = entries.get(id(parameter))
        if entry is not None:
            _, cast, version, address, _ = entry
            if parameter._version == version and parameter.data_ptr() == address and _serves(cast, parameter, grad):
                return cast
        cast = convert(parameter)
        if cast is not parameter:
            # An inference tensor has no version to hold a cast by, which is as good as never: tried, not asked.
            with contextlib.suppress(RuntimeError):
                version, address = parameter._version, parameter.data_ptr()
                entries[id(parameter)] = parameter, cast, version, address, parameter.untyped_storage()
        return cast

    def share(self, tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``convert(tensor)``, the earlier result where this tensor was the last that was cast."""
        local = self._local
        last = local.last
        if last is not None and last[0] is tensor:
            _, cast, version, address, stream = last
            if (
                tensor._version == version
                and tensor.data_ptr() == address
                # Another stream would have to wait for the cast, and nobody told it to.
                and (tensor.is_cpu or _stream_of(tensor) == stream)
                and _serves(cast, tensor, torch.is_grad_enabled())
            ):
                return cast
        cast = convert(tensor)
        # An inference tensor has no version to hold a cast by, and a wrapper of torch.func no address.
        try:
            local.last = (
                tensor, cast, tensor._version, tensor.data_ptr(), None if tensor.is_cpu else _stream_of(tensor),
            )  # fmt: skip
        except RuntimeError:
            local.last = None
        return cast


def _serves(cast: Tensor, source: Tensor, grad: bool) -> bool:
    """Tell whether a cast that was made in some mode serves in this one."""
    return (
        cast.requires_grad is (grad and source.requires_grad)
        # A wrapper of torch.func is dead outside its transform, and an inference tensor is not saved for backward.
        and not is_functorch_wrapped_tensor(cast)
        and (not cast.is_inference() or torch.is_inference_mode_enabled())
    )


def _pinned_cast(pin: _Pin, parameter: Parameter, convert: Callable[[Tensor], Tensor]) -> Tensor:
    cast = pin.cast
    if cast is None:
        # Made outside inference mode, so that it serves inside and outside.
        with torch.inference_mode(False), torch.no_grad():
            cast = convert(parameter)
        if not is_functorch_wrapped_tensor(cast):
            pin.cast = cast
    return cast


def _stream_of(tensor: Tensor) -> Any:
    """Return what tells the stream in use on an accelerator from its others."""
    return torch.accelerator.current_stream(tensor.device)


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
        narrow = Tensor.half if dtype is torch.float16 else Tensor.bfloat16
        # Each caster twice: of one value, however nested, and of the positional arguments of a call.
        self.to_half, self.args_to_half = self._casters(dtype, narrow, cached=True)
        self.to_fp32, self.args_to_fp32 = self._casters(torch.float32, Tensor.float, cached=False)

    def open(self) -> None:
        """Let the replacements cast, in the threads that are on by default."""
        if self._on and not self._open:
            self.blocks.pop()
        self._open = True
        type(self.local).on = self._on
        # A block that turns casts on, such as a module's precision, must not do so in a thread that is off by default.
        type(self.local).forced_off = not self._on

    @property
    def is_open(self) -> bool:
        """Whether replacements may cast at all."""
        return self._open

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
        switches = self.switches()

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.switched_to(switches):
                return function(*args, **kwargs)

        return run

    def switches(self) -> tuple[bool, bool]:
        """Return how this thread casts now, for `switched_to`."""
        return self.local.on, self.local.forced_off

    @contextlib.contextmanager
    def switched_to(self, switches: tuple[bool, bool]) -> Iterator[None]:
        """Let this thread cast for a block as one did when it called `switches`."""
        own = vars(self.local)
        before = own.get("on"), own.get("forced_off")
        self.blocks.append(None)
        own["on"], own["forced_off"] = switches
        try:
            yield
        finally:
            put_back(own, "on", before[0])
            put_back(own, "forced_off", before[1])
            self.blocks.pop()

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

    def _casters(
        self, target: torch.dtype, convert: Callable[[Tensor], Tensor], *, cached: bool
    ) -> tuple[Callable[[Any], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
        sources = _FLOATS - {target}
        cache, autocast_rules, on_device = self.cache, self.autocast_rules, _on_device(self.device_type)
        compiling, any_autocast = torch.compiler.is_dynamo_compiling, torch._C._is_any_autocast_enabled
        strided, plain, local = torch.strided, PLAIN_TYPES, self.local
        on_cpu, share, in_inference_mode = self.device_type == "cpu", cache.share, torch.is_inference_mode_enabled

        def convert_fitting(tensor: Tensor) -> Tensor:
            if tensor.dtype not in sources or not on_device(tensor):
                return tensor
            if tensor.layout is not strided and tensor.layout not in CASTABLE_LAYOUTS:
                raise SparseArgument
            return convert(tensor)

        def cast_tensor(tensor: Tensor) -> Tensor:
            return tensor if any_autocast() and autocast_rules() else convert_fitting(tensor)

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
                    return cache.cast(value, convert_fitting)
                return cast_tensor(value)
            return map_tensors(value, cast_nested)

        def cast_args(args: Sequence[Any]) -> Sequence[Any]:
            # The hot path of most models: what holds for all arguments is asked once.
            if compiling() or any_autocast():
                return [*map(cast, args)]
            entries, pins = (local.entries, cache.pins) if cached else (None, None)
            shared = entries is not None and not in_inference_mode()
            new = []
            for arg in args:
                kind = type(arg)
                if kind is Tensor or kind is Parameter:
                    dtype = arg.dtype
                    if dtype is not target and dtype in sources and (arg.is_cpu if on_cpu else on_device(arg)):
                        if arg.layout is not strided and arg.layout not in CASTABLE_LAYOUTS:
                            raise SparseArgument
                        if kind is Tensor:
                            arg = share(arg, convert) if shared else convert(arg)
                        elif (pins and id(arg) in pins) or (entries is not None and id(arg) in entries):
                            arg = cache.cast(arg, convert)
                        else:
                            if entries is not None:
                                # Most are used once in a module call. From the second use on the cast is kept.
                                entries[id(arg)] = None
                            arg = convert(arg)
                elif kind is list and all(type(item) is Parameter or type(item) is Tensor for item in arg):
                    # The weights of a recurrent layer, as a rule.
                    items = cast_args(arg)
                    if any(map(operator.is_not, items, arg)):
                        arg = items
                elif kind not in plain:
                    arg = map_tensors(arg, cast_nested)
                new.append(arg)
            return new

        return cast, cast_args


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
