"""The casts of one handle: what casts the arguments of a call, all at once, and whether a thread casts now.

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
from torch.nn import Module, Parameter

from autoamp.core.cache import CastCache
from autoamp.core.threads import BY_DEFAULT, ThreadMode, ThreadState, TracedMode
from autoamp.tensors import CASTABLE_LAYOUTS, HALF_DTYPES, PLAIN_TYPES, iter_tensors, map_tensors
from autoamp.torch_private import is_any_autocast_enabled, is_autocast_enabled, trace_as

CASTABLE_DTYPES = frozenset({*HALF_DTYPES, torch.float32})
"""The dtypes of the tensors that are cast."""

_TENSORS = frozenset({Tensor, Parameter})

CastArgs = Callable[..., Sequence[Any]]
"""Casts a sequence of arguments, however nested, into a new one; returns the same object where nothing is cast.

With ``shares=False``, as second argument, an activation is cast anew and its cast is not kept.
"""


def build_caster(
    target: torch.dtype,
    convert: Callable[[Tensor], Tensor],
    device_type: str,
    cache: CastCache | None,
    count: list[int],
) -> CastArgs:
    """Build the function that casts arguments to one dtype. Most patched calls go through it, so it calls little.

    Args:
        target: The dtype.
        convert: Casts one tensor to it.
        device_type: The type of the devices whose tensors are cast.
        cache: Keeps casts of parameters, and of the last activation; None to keep none.
        count: The number of casts, its one element, but of those in compiled code and in calls with sparse tensors.
    """
    castable, strided, plain = CASTABLE_DTYPES, torch.strided, PLAIN_TYPES
    # Reading these attributes takes a third of the time of ``tensor.device.type``.
    on_cpu, on_cuda = device_type == "cpu", device_type == "cuda"
    any_autocast, autocast_rules = is_any_autocast_enabled, is_autocast_enabled
    local: Any = None if cache is None else cache.local
    cached: Any = None if cache is None else cache.cast
    cast_activation: Any = None if cache is None else cache.cast_activation

    def cast_traced(args: Sequence[Any], shares: bool = True) -> Sequence[Any]:
        # A compiler shares casts within its graph.
        return args if any_autocast() and autocast_rules(device_type) else _cast_all(args, target, convert, device_type)

    @trace_as(cast_traced)
    def cast_args(args: Sequence[Any], shares: bool = True) -> Sequence[Any]:
        # In an autocast region of this device type torch casts.
        if any_autocast() and autocast_rules(device_type):
            return args
        param_casts, pins, new = None, None, None
        if cache is not None:
            param_casts, pins = local.param_casts, cache.pins
        for place, arg in enumerate(args):
            kind = type(arg)
            if kind is Tensor or kind is Parameter or (kind not in plain and isinstance(arg, Tensor)):
                dtype = arg.dtype
                if dtype is target or dtype not in castable:
                    continue
                if not (arg.is_cpu if on_cpu else arg.is_cuda if on_cuda else arg.device.type == device_type):
                    continue
                if arg.layout is not strided and arg.layout not in CASTABLE_LAYOUTS:
                    common = dtype_with_sparse(iter_tensors(args), target)
                    return _cast_all(args, common, convert if common is target else Tensor.float, device_type)
                if kind is Parameter and (
                    (param_casts is not None and id(arg) in param_casts) or (pins and id(arg) in pins)
                ):
                    cast = cached(arg, convert)
                elif kind is Tensor and shares and param_casts is not None and arg.requires_grad:
                    cast = cast_activation(arg, convert)
                else:
                    if kind is Parameter and param_casts is not None:
                        # Most are used once in a module call. From the second use on the cast is kept.
                        param_casts[id(arg)] = None
                    cast = convert(arg)
                count[0] += 1
            elif kind in plain:
                continue
            elif (kind is list or kind is tuple) and all(type(item) in _TENSORS for item in arg):
                # Usually the weights of a recurrent layer, or its states.
                cast = cast_args(arg, shares)
                cast = tuple(cast) if kind is tuple else cast
            else:
                cast = map_tensors(arg, lambda tensor: cast_args((tensor,), shares=False)[0])
            if new is None:
                new = list(args)
            new[place] = cast
        return args if new is None else new

    return cast_args


def _cast_all(
    args: Sequence[Any], target: torch.dtype, convert: Callable[[Tensor], Tensor], device_type: str
) -> Sequence[Any]:
    """Cast the arguments of a call whatever their layout, for one that is sparse, and for Dynamo.

    Dynamo refuses to read layouts in the backward of a custom function, and takes no sparse tensors.
    """

    def cast(tensor: Tensor) -> Tensor:
        dtype = tensor.dtype
        is_cast = dtype is not target and dtype in CASTABLE_DTYPES and tensor.device.type == device_type
        return convert(tensor) if is_cast else tensor

    return [map_tensors(arg, cast) for arg in args]


def dtype_with_sparse(tensors: Iterable[Tensor], target: torch.dtype) -> torch.dtype:
    """Return what the arguments of a call become, one of which is sparse: fp32, but for one sparse COO matrix.

    torch has no half kernels for two sparse factors and for batches, nor on CPUs for the compressed layouts. The
    cast of a sparse matrix cannot pass a dense gradient back, which `torch.mm` gives it.
    """
    sparse = [tensor for tensor in tensors if tensor.layout not in CASTABLE_LAYOUTS]
    is_matrix = len(sparse) == 1 and sparse[0].layout is torch.sparse_coo and sparse[0].dim() == 2
    return target if is_matrix and not sparse[0].requires_grad else torch.float32


def cast_call(cast_args: CastArgs, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Cast the arguments of a call, by position and by name."""
    if not kwargs:
        return cast_args(args), kwargs
    given = (*args, *kwargs.values())
    new = cast_args(given)
    if new is given:
        return args, kwargs
    return new[: len(args)], dict(zip(kwargs, new[len(args) :], strict=True))


def _is_eligible_traced(casts: CastState, tensor: Tensor) -> bool:
    """`CastState.eligible` as `_cast_all`: Dynamo reads no layout in the backward of a custom function."""
    is_castable = tensor.dtype in CASTABLE_DTYPES and tensor.device.type == casts.device_type
    return is_castable and not casts.autocast_rules()


class CastCounts:
    """How often one handle's casts were at work. Threads that add at the same time may lose one.

    Attributes:
        calls: The number of calls of listed functions with casts on, by what the policy does: "half", "fp32" or
            "promote". Each is the one element of a list, since an addition to it costs no call.
        made: The number of casts of their arguments by dtype, in the same way.
    """

    def __init__(self, half: torch.dtype) -> None:
        self.calls: dict[str, list[int]] = {"half": [0], "fp32": [0], "promote": [0]}
        self.made: dict[torch.dtype, list[int]] = {half: [0], torch.float32: [0]}

    def reset(self) -> None:
        """Set every number to 0, in a fork whose parent has them."""
        for count in (*self.calls.values(), *self.made.values()):
            count[0] = 0


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
        disabled_at: The line of the program that first entered a disabled autocast region in which casts are off.
        counts: How often the casts were at work.
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
        narrow = Tensor.half if dtype is torch.float16 else Tensor.bfloat16
        self.disabled_at: str | None = None
        self.explain: Callable[[Exception], None] = lambda error: None
        self.counts = CastCounts(dtype)
        made = self.counts.made
        self.args_to_half = build_caster(dtype, narrow, device_type, self.cache, made[dtype])
        self.args_to_fp32 = build_caster(torch.float32, Tensor.float, device_type, None, made[torch.float32])
        # For what is no argument of a listed function, such as the outputs of a model: not counted.
        self._value_casters = {
            dtype: build_caster(dtype, narrow, device_type, self.cache, [0]),
            torch.float32: build_caster(torch.float32, Tensor.float, device_type, None, [0]),
        }

    def open(self) -> None:
        """Let the replacements cast, in the threads that are on by default."""
        self.is_open = True
        # Off by default means forced off: a module's precision must not turn casts on there.
        self.local.set_default(self._on, forced_off=BY_DEFAULT if self._on is False else False)

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
        """Whether a call with these arguments is to be cast by the handle's own rules, in this thread and now."""
        return self.local.now().on is True

    def when_off(
        self, original: Callable[..., Any], replacement: Callable[..., Any], local: ThreadState | TracedMode
    ) -> Callable[..., Any]:
        """Return what a replacement calls where ``local.mode.on`` is false: here the original."""
        return original

    def obeys_disabled(self, mode: ThreadMode | TracedMode) -> bool:
        """Whether a disabled torch.autocast region that begins now turns these casts off.

        Args:
            mode: The switches where it begins.
        """
        return True

    def begin_call(self, module: Module) -> bool | None:
        """Whether casts are to be turned on for the call of a module; asked where `in_modules` is true.

        None: the modules that are called within it are asked in their turn.
        """
        return False

    @contextlib.contextmanager
    def switched(self, on: Any, forced_off: Any = None) -> Iterator[None]:
        """Set this thread's switches for a ``with`` statement, as `ThreadState.set` does."""
        token = self.local.set(on, forced_off)
        try:
            yield
        except Exception as error:
            self.explain(error)
            raise
        finally:
            self.local.reset(token)

    def mode(self) -> tuple[Any, Any]:
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
        return is_any_autocast_enabled() and is_autocast_enabled(self.device_type)

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
        return self._value_casters[self.dtype]((value,), False)[0]

    def to_fp32(self, value: Any) -> Any:
        """Cast one value, however nested, to fp32."""
        return self._value_casters[torch.float32]((value,), False)[0]

    def promote_args(self, args: Sequence[Any], shares: bool = False) -> Sequence[Any]:
        """Cast a sequence of arguments to fp32, where the tensors that `eligible` admits have several dtypes."""
        dtypes = {tensor.dtype for tensor in iter_tensors(args) if self.eligible(tensor)}
        return self.args_to_fp32(args) if len(dtypes) > 1 else args
