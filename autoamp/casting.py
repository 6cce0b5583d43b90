"""Casting arguments: what is cast and to what, and each thread's switch.

What is cast: tensors of the handle's device type in fp16, bf16 or fp32, of a dense layout. Integers, bool, complex,
fp64, sparse tensors and tensors of other devices are left as they are.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.cast_cache import CastCache, Switches, ThreadState
from autoamp.tensors import CASTABLE_LAYOUTS, HALF_DTYPES, PLAIN_TYPES, iter_tensors, map_tensors
from autoamp.torch_private import is_any_autocast_enabled

__all__ = ["Casts", "SparseArgument", "on_device"]

_FLOATS = frozenset({*HALF_DTYPES, torch.float32})


class SparseArgument(Exception):
    """Raised while arguments are cast, where one is sparse: the whole call is to go through as it came."""


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
        self.blocks = self.local.blocks
        # Until `open` lets replacements cast, no thread does.
        self.blocks.append(None)
        self._on = on
        self._open = False
        self.cache = CastCache(self.local, enable_caching)
        self.warned: set[str] = set()
        # By the id of a replacement it and what does the same for a tensor and parameters, with less to ask. By id,
        # since what somebody puts around a replacement may pass for equal to it.
        self.layers: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self.narrow = Tensor.half if dtype is torch.float16 else Tensor.bfloat16
        # Each caster twice: of one value, however nested, and of the positional arguments of a call.
        self.to_half, self.args_to_half = self._casters(dtype, self.narrow, cached=True)
        self.to_fp32, self.args_to_fp32 = self._casters(torch.float32, Tensor.float, cached=False)

    def open(self) -> None:
        """Let the replacements cast, in the threads that are on by default."""
        if self._on and not self._open:
            self.blocks.pop()
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
            self.blocks.append(None)
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
            tensor.dtype in _FLOATS
            and tensor.device.type == self.device_type
            and tensor.layout in CASTABLE_LAYOUTS
            and not self.autocast_rules()
        )

    def autocast_rules(self) -> bool:
        """Tell whether a torch.autocast region is in force here: then torch casts, and we step aside."""
        return is_any_autocast_enabled() and torch.is_autocast_enabled(self.device_type)

    def promote(self, args: Any) -> Any:
        """Cast a whole argument list: floating tensors of several dtypes all go to fp32, the widest."""
        dtypes = {tensor.dtype for tensor in iter_tensors(args) if self.eligible(tensor)}
        return map_tensors(args, self.to_fp32) if len(dtypes) > 1 else args

    def _casters(
        self, target: torch.dtype, convert: Callable[[Tensor], Tensor], *, cached: bool
    ) -> tuple[Callable[[Any], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
        sources = _FLOATS - {target}
        cache, autocast_rules, here = self.cache, self.autocast_rules, on_device(self.device_type)
        compiling, any_autocast = torch.compiler.is_dynamo_compiling, is_any_autocast_enabled
        strided, plain, local, pins = torch.strided, PLAIN_TYPES, self.local, cache.pins
        on_cpu, share, in_inference_mode = self.device_type == "cpu", cache.share, torch.is_inference_mode_enabled

        def convert_fitting(tensor: Tensor) -> Tensor:
            if tensor.dtype not in sources or not here(tensor):
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
                if cached and value.dtype in sources and not compiling() and not any_autocast():
                    return cache.cast(value, convert_fitting)
                return cast_tensor(value)
            return map_tensors(value, cast_nested)

        def cast_args(args: Sequence[Any]) -> Sequence[Any]:
            # The hot path of most models: what holds for all arguments is asked once.
            if compiling() or any_autocast():
                return [*map(cast, args)]
            entries = local.entries if cached else None
            return cast_each(args, entries, entries is not None and not in_inference_mode())

        def cast_each(args: Sequence[Any], entries: Any, shared: bool) -> list[Any]:
            new = []
            for arg in args:
                kind = type(arg)
                if kind is Tensor or kind is Parameter:
                    dtype = arg.dtype
                    if dtype is not target and dtype in sources and (arg.is_cpu if on_cpu else here(arg)):
                        if arg.layout is not strided and arg.layout not in CASTABLE_LAYOUTS:
                            raise SparseArgument
                        if kind is Tensor:
                            arg = share(arg, convert) if shared else convert(arg)
                        elif cached and ((pins and id(arg) in pins) or (entries is not None and id(arg) in entries)):
                            arg = cache.cast(arg, convert)
                        else:
                            if entries is not None:
                                # Most are used once in a module call. From the second use on the cast is kept.
                                entries[id(arg)] = None
                            arg = convert(arg)
                elif kind is list or kind is tuple:
                    # The weights of a recurrent layer, or its states, as a rule.
                    for item in arg:
                        if type(item) is not Parameter and type(item) is not Tensor:
                            arg = map_tensors(arg, cast_nested)
                            break
                    else:
                        items = cast_each(arg, entries, shared)
                        if any(map(operator.is_not, items, arg)):
                            arg = items if kind is list else tuple(items)
                elif kind not in plain:
                    arg = map_tensors(arg, cast_nested)
                new.append(arg)
            return new

        return cast, cast_args


def on_device(device_type: str) -> Callable[[Tensor], bool]:
    """Return a test of a tensor's device type: where torch has an attribute for it, that costs a third."""
    if device_type == "cuda":
        return lambda tensor: tensor.is_cuda
    if device_type == "cpu":
        return lambda tensor: tensor.is_cpu
    return lambda tensor: tensor.device.type == device_type
