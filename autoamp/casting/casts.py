"""The casts of one handle: what casts to its half dtype and to fp32, and whether a thread casts now.

What is cast: tensors of the handle's device type in fp16, bf16 or fp32, of a dense layout. Integers, bool, complex,
fp64 and tensors of other devices are left as they are, and so are sparse ones, but for products with half tensors.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting.cache import CastCache
from autoamp.casting.casters import CASTABLE_DTYPES, build_caster
from autoamp.casting.threads import Switches, ThreadState, TracedMode
from autoamp.tensors import CASTABLE_LAYOUTS, iter_tensors
from autoamp.torch_private import is_any_autocast_enabled, trace_as


def _is_eligible_traced(casts: CastState, tensor: Tensor) -> bool:
    """`CastState.eligible` as `_cast_all` in `casters`: Dynamo reads no layout in the backward of a custom function."""
    is_castable = tensor.dtype in CASTABLE_DTYPES and tensor.device.type == casts.device_type
    return is_castable and not casts.autocast_rules()


class CastState:
    """Casts for one handle: the half dtype, the device type, each thread's switches, the cache.

    Args:
        dtype: The half dtype, ``torch.float16`` or ``torch.bfloat16``.
        device_type: The type of the devices whose tensors are cast, such as ``"cuda"``.
        enable_caching: Whether module calls keep casts of parameters.
        on: Whether threads cast by default. With False only those do that turn casts on, for a ``with`` statement or a
            call. None is for a subclass that turns casts on within calls of modules.

    Attributes:
        local: The switches and the kept casts of the thread that asks.
        cache: Keeps casts of parameters, and of the last activation.
        warned: The names of banned functions whose warning was given already.
        yielded_to: What the program casts with itself, such as ``"torch.autocast"``, so that these casts ended.
        own_dtypes: The half dtypes that the program itself computes in, as far as they were seen: those of its models,
            and those of its enabled autocast regions by how often it entered them.
        explain: Adds a note to an exception that leaves a patched op or a module's call, if it is about dtypes.
        args_to_half, args_to_fp32: Cast a sequence of arguments, as `build_caster` says.
    """

    in_modules = False
    """Whether casts are on within calls of modules alone."""

    def __init__(
        self, dtype: torch.dtype, device_type: str, *, enable_caching: bool = True, on: bool | None = True
    ) -> None:
        self.dtype = dtype
        self.device_type = device_type
        self.local = ThreadState()
        self._on = on
        self.is_open = False
        self.cache = CastCache(self.local, enable_caching)
        self.warned: set[str] = set()
        self.yielded_to: str | None = None
        self.own_dtypes: Counter[torch.dtype] = Counter()
        self.narrow = Tensor.half if dtype is torch.float16 else Tensor.bfloat16
        self.explain: Callable[[Exception], None] = lambda error: None
        self.args_to_half = build_caster(dtype, self.narrow, device_type, self.cache)
        self.args_to_fp32 = build_caster(torch.float32, Tensor.float, device_type, None)

    def open(self) -> None:
        """Let the replacements cast, in the threads that are on by default."""
        self.is_open = True
        # Off by default means forced off: a module's precision must not turn casts on there.
        self.local.set_default(self._on, forced_off=self._on is False)

    @property
    def on_by_default(self) -> bool:
        """Whether threads that have not set their switches may cast."""
        return self._on is not False

    def shut(self) -> None:
        """Make every replacement pass calls through, in all threads."""
        self.is_open = False
        self.local.set_default(False, forced_off=True)
        self.cache.clear()

    def wants(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments is to be cast, in this thread and now."""
        return bool(self.local.now().on)

    def when_off(
        self, original: Callable[..., Any], replacement: Callable[..., Any], local: ThreadState | TracedMode
    ) -> Callable[..., Any]:
        """Return what a replacement calls where ``local.switches.on`` is false: here the original."""
        return original

    def begin_call(self, module: Module) -> bool:
        """Whether casts are to be turned on for the call of a module; asked where `in_modules` is true."""
        return False

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Cast again, for a closure that an optimizer calls within its step, during which casts are off."""
        return self.switched(None if self.in_modules else True)

    @contextlib.contextmanager
    def switched(self, on: bool | None, forced_off: bool | None = None) -> Iterator[None]:
        """Set this thread's switches for a ``with`` statement, as `ThreadState.set` does."""
        token = self.local.set(on, forced_off)
        try:
            yield
        except Exception as error:
            self.explain(error)
            raise
        finally:
            self.local.reset(token)

    def remembered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that it runs as this thread casts now, whenever and in whichever thread it is called."""
        return self.local.with_mode(function, *self.mode())

    def mode(self) -> Switches:
        """Return how this thread casts now, for `ThreadState.set`."""
        mode = self.local.now()
        return mode.on, mode.forced_off

    @trace_as(_is_eligible_traced)
    def eligible(self, tensor: Tensor) -> bool:
        """Whether a tensor is of a dtype, device type and layout that is cast, and no autocast region casts."""
        return (
            tensor.dtype in CASTABLE_DTYPES
            and tensor.device.type == self.device_type
            and tensor.layout in CASTABLE_LAYOUTS
            and not self.autocast_rules()
        )

    def autocast_rules(self) -> bool:
        """Whether this thread is in a torch.autocast region of this device type: there torch casts, and not we."""
        return is_any_autocast_enabled() and torch.is_autocast_enabled(self.device_type)

    def note_autocast(self, device_type: str, *, enabled: bool) -> None:
        """Note that the program enters a torch.autocast region: nothing but `autocast_rules` follows from it."""

    def note_step(self) -> None:
        """Note that an optimizer has stepped."""

    def yield_to(self, whom: str, dtypes: Iterable[torch.dtype] = ()) -> None:
        """Note that the program casts by itself: nothing follows from it where casts do not follow modules.

        Args:
            whom: What it casts with: a class of torch or autoamp, or its half model.
            dtypes: The half dtypes that the program computes in, if they are known.
        """

    def to_half(self, value: Any) -> Any:
        """Cast one value, however nested, to the half dtype."""
        return self.args_to_half((value,), False)[0]

    def to_fp32(self, value: Any) -> Any:
        """Cast one value, however nested, to fp32."""
        return self.args_to_fp32((value,), False)[0]

    def promote_args(self, args: Sequence[Any], shares: bool = False) -> Sequence[Any]:
        """Cast a sequence of arguments to fp32, where the tensors that `eligible` admits have several dtypes."""
        dtypes = {tensor.dtype for tensor in iter_tensors(args) if self.eligible(tensor)}
        return self.args_to_fp32(args) if len(dtypes) > 1 else args
