"""The casts of one handle: what casts the arguments of a call, all at once, and whether a thread casts now.

What is cast: tensors of the handle's device type in fp16, bf16 or fp32, of a dense layout. Integers, bool, complex,
fp64 and tensors of other devices are left as they are, and so are sparse ones, but for products with half tensors.

What differs by thread: whether casts are on, by two switches that are set and put back by tokens, and the casts that
the running module call keeps. Casts of parameters are kept while the outermost module call runs or they are pinned,
and so is the last activation. A kept cast is returned again only while neither its source nor the cast itself has been
written to, as far as torch records it.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from autoamp.tensors import CASTABLE_LAYOUTS, HALF_DTYPES, PLAIN_TYPES, iter_tensors, map_tensors
from autoamp.torch_private import (
    current_stream,
    is_any_autocast_enabled,
    is_autocast_enabled,
    is_transformed,
    mark_constant,
    trace_as,
    tracing_context,
    tracing_state,
)

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


class _Pin:
    """A parameter that is promised not to be written to.

    Attributes:
        promises: How many `CastCache.pin` are around.
        kept: Its cast and the cast's version when it was made, None until there is one.
        layer: What the inference package made of the weights of a whole layer; it has ``parameters``, which are all
            pinned while it is here.
    """

    __slots__ = ("kept", "layer", "promises")

    def __init__(self) -> None:
        self.promises = 0
        self.kept: tuple[Tensor, int] | None = None
        self.layer: Any = None


class CastCache:
    """Casts of parameters, kept while the outermost module call runs, and the cast of the last activation.

    A cast is stale as soon as its parameter changes. Identity, version and address show most changes; nothing shows a
    write through ``.data``, numpy or a flat buffer. Such writes happen between module calls, so no cast is kept past
    the outermost one, with or without gradients. A module that writes so between two uses of one weight within its own
    call needs ``init(enable_caching=False)``. `pin` is the explicit promise that the weights stay.

    The cast of an activation is kept until the next one is cast: query, key and value often come from one tensor.

    Attributes:
        enabled: Whether module calls keep casts.
        pins: The pinned parameters, by ``id(parameter)``.
        lock: Taken while ``pins`` changes.
        thread: Has the casts that this thread's running module call keeps.
    """

    def __init__(self, local: ThreadState, enabled: bool = True) -> None:
        self.enabled = enabled
        self.thread = local
        self.pins: dict[int, _Pin] = {}
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def pin(self, parameters: list[Parameter]) -> Iterator[None]:
        """Keep the casts of these parameters, where no gradient is asked of them, within the ``with`` statement."""
        with self.lock:
            for parameter in parameters:
                self.pins.setdefault(id(parameter), _Pin()).promises += 1
        try:
            yield
        finally:
            with self.lock:
                for parameter in parameters:
                    self.pins[id(parameter)].promises -= 1
                    if not self.pins[id(parameter)].promises:
                        del self.pins[id(parameter)]
                for pin in self.pins.values():
                    if pin.layer is not None and any(id(one) not in self.pins for one in pin.layer.parameters):
                        pin.layer = None

    def clear(self) -> None:
        """Drop the casts of this thread's running module call."""
        if self.thread.param_casts is not None:
            self.thread.param_casts = {}
            self.thread.last_activation = None

    def __len__(self) -> int:
        kept = sum(entry is not None for entry in (self.thread.param_casts or {}).values())
        pins = list(self.pins.values())
        packed = sum(len(pin.layer.parameters) for pin in pins if pin.layer is not None)
        return kept + packed + sum(pin.kept is not None for pin in pins)

    def cast(self, parameter: Parameter, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``convert(parameter)``, or the kept cast where it is still valid.

        The cast is kept where that is possible. Most callers come here from a parameter's second use on, and at the
        first call ``convert`` themselves: see `ThreadState.param_casts`.

        Args:
            parameter: fp32, of any shape.
            convert: Returns a tensor in the half dtype, of the same shape; part of the graph if gradients are on.
        """
        grad = torch.is_grad_enabled()
        # `torch.jit.trace` would record a kept cast as a constant.
        if self.pins and not (grad and parameter.requires_grad) and tracing_state() is None:
            pin = self.pins.get(id(parameter))
            if pin is not None:
                if pin.kept is None or pin.kept[0]._version != pin.kept[1]:
                    cast = cast_for_any_mode(parameter, convert)
                    if cast is parameter or not is_cacheable(cast):
                        return cast
                    pin.kept = cast, cast._version
                return pin.kept[0]
        param_casts = self.thread.param_casts
        if param_casts is None:
            return convert(parameter)
        entry = param_casts.get(id(parameter))
        if (
            entry is not None
            and _is_valid(entry)
            and entry[1].requires_grad is (grad and parameter.requires_grad)
            # A wrapper of torch.func is dead outside its transform, and an inference tensor is not saved for backward.
            and not is_transformed(entry[1])
            and (not entry[1].is_inference() or torch.is_inference_mode_enabled())
        ):
            return entry[1]
        cast = cast_for_any_mode(parameter, convert) if torch.is_inference_mode_enabled() else convert(parameter)
        if cast is not parameter:
            # An inference tensor has no version, so no cast of it is kept. As parameters they are rare, so that the
            # exception costs less than a test for each parameter.
            with contextlib.suppress(RuntimeError):
                param_casts[id(parameter)] = (
                    parameter, cast, parameter._version, cast._version, parameter.data_ptr(),
                    parameter.untyped_storage(),
                )  # fmt: skip
        return cast

    def cast_activation(self, tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``convert(tensor)``, or the kept cast where this activation was the last that was cast.

        Not for a tensor without gradients: numpy or a collective may write to it without a new version.

        Args:
            tensor: A floating-point tensor that requires gradients, of any shape.
            convert: Returns the tensor in the half dtype, as part of the graph.
        """
        last = self.thread.last_activation
        # After a `detach_()` it is a leaf, and the cast belongs to the graph before that. On another stream the cast
        # may not be computed yet.
        state = tensor.is_leaf, None if tensor.is_cpu else current_stream(tensor)
        if (
            last is not None
            and last[0] is tensor
            and last[5] == state
            and last[1].requires_grad
            and torch.is_grad_enabled()
            # A wrapper of torch.func is dead outside its transform.
            and not is_transformed(last[1])
            and _is_valid(last)
        ):
            return last[1]
        cast = convert(tensor)
        if cast.requires_grad:
            try:
                self.thread.last_activation = tensor, cast, tensor._version, cast._version, tensor.data_ptr(), state
            except RuntimeError:
                # A wrapper of torch.func has no address.
                self.thread.last_activation = None
        return cast


def _is_valid(kept: KeptCast) -> bool:
    """Whether neither the source nor the cast was written to, as far as torch records it."""
    source, cast, version, cast_version, address, _ = kept
    return source._version == version and cast._version == cast_version and source.data_ptr() == address


def is_cacheable(cast: Tensor) -> bool:
    """Whether later calls can use a cast: not a subclass, such as a fake tensor, nor a wrapper of `torch.func`."""
    return type(cast) is Tensor and not is_transformed(cast)


def cast_for_any_mode(parameter: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Cast without gradients, outside inference mode, so that the cast has a version and can be used in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        return convert(parameter)


CASTABLE_DTYPES = frozenset({*HALF_DTYPES, torch.float32})
"""The dtypes of the tensors that are cast."""

_TENSORS = frozenset({Tensor, Parameter})

CastArgs = Callable[..., Sequence[Any]]
"""Casts a sequence of arguments, however nested, into a new one; returns the same object where nothing is cast.

The caller sees to it that no torch.autocast region casts.

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
    wanted, strided, plain = CASTABLE_DTYPES - {target}, torch.strided, PLAIN_TYPES
    # To read these attributes takes a third of the time of ``tensor.device.type``.
    is_here: Callable[[Tensor], bool] = lambda tensor: tensor.device.type == device_type  # noqa: E731
    if device_type in ("cpu", "cuda"):
        is_here = operator.attrgetter(f"is_{device_type}")
    local: Any = None if cache is None else cache.thread
    pins: dict[int, Any] = {} if cache is None else cache.pins
    cached: Any = None if cache is None else cache.cast
    cast_activation: Any = None if cache is None else cache.cast_activation

    def cast_traced(args: Sequence[Any], shares: bool = True) -> Sequence[Any]:
        # A compiler shares casts within its graph.
        return _cast_all(args, target, convert, device_type)

    @trace_as(cast_traced)
    def cast_args(args: Sequence[Any], shares: bool = True) -> Sequence[Any]:
        param_casts, new = None if local is None else local.param_casts, None
        for place, arg in enumerate(args):
            kind = type(arg)
            if kind is Tensor or kind is Parameter or (kind not in plain and isinstance(arg, Tensor)):
                if arg.dtype not in wanted or not is_here(arg):
                    continue
                if arg.layout is not strided and arg.layout not in CASTABLE_LAYOUTS:
                    common = dtype_with_sparse(iter_tensors(args), target)
                    return _cast_all(args, common, convert if common is target else Tensor.float, device_type)
                if kind is Parameter:
                    key = id(arg)
                    if key in pins or (param_casts is not None and key in param_casts):
                        cast = cached(arg, convert)
                    else:
                        if param_casts is not None:
                            # Most are used once in a module call. From the second use on the cast is kept.
                            param_casts[key] = None
                        cast = convert(arg)
                elif kind is Tensor and shares and param_casts is not None and arg.requires_grad:
                    cast = cast_activation(arg, convert)
                else:
                    cast = convert(arg)
                count[0] += 1
            elif kind in plain:
                continue
            elif (kind is list or kind is tuple) and plain.issuperset(map(type, arg)):
                # Usually the shape of a norm, or the strides of a convolution.
                continue
            elif (kind is list or kind is tuple) and _TENSORS.issuperset(map(type, arg)):
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
    if all(type(value) in PLAIN_TYPES for value in kwargs.values()):
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


class CastState:
    """Casts for one handle: the half dtype, the device type, each thread's switches, the cache.

    Args:
        dtype: The half dtype, ``torch.float16`` or ``torch.bfloat16``.
        device_type: The type of the devices whose tensors are cast, such as ``"cuda"``.
        enable_caching: Whether module calls keep casts of parameters.
        on: Whether threads cast by default. With False only those do that turn casts on, for a ``with`` statement or a
            call. None is for a subclass that turns casts on within calls of modules.

    Attributes:
        thread: The switches and the kept casts of the thread that asks.
        cache: Keeps casts of parameters, and of the last activation.
        warned: The names of banned functions whose warning was given already.
        yielded_to: What the program casts with itself, such as ``"torch.autocast"``, so that these casts ended.
        own_dtypes: The half dtypes that the program itself computes in, as far as they were seen: those of its models,
            and those of its enabled autocast regions by how often it entered them.
        disabled_at: The line of the program that first entered a disabled autocast region in which casts are off.
        counts: How often the casts were at work.
        explain: Called with an exception that leaves a patched op or a module's call. What looks on sets it, and adds
            a note to one about dtypes; without that it does nothing.
        args_to_half, args_to_fp32: Cast a sequence of arguments, as `build_caster` says.
    """

    in_modules = False
    """Whether casts are on within calls of modules alone."""

    def __init__(
        self, dtype: torch.dtype, device_type: str, *, enable_caching: bool = True, on: bool | None = True
    ) -> None:
        self.dtype = dtype
        self.device_type = device_type
        self.thread = ThreadState()
        self._on = on
        self.enabled = False
        self.cache = CastCache(self.thread, enable_caching)
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

    def enable(self) -> None:
        """Let the replacements cast, in the threads that are on by default."""
        self.enabled = True
        # Off by default means forced off: a module's precision must not turn casts on there.
        self.thread.set_default(self._on, forced_off=BY_DEFAULT if self._on is False else False)

    @property
    def on_by_default(self) -> bool:
        """Whether threads that have not set their switches may cast."""
        return self._on is not False

    def disable(self) -> None:
        """Make every replacement pass calls through, in all threads."""
        self.enabled = False
        self.thread.set_default(False, forced_off=True)
        self.cache.clear()

    def wants(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments is to be cast by the handle's own rules, in this thread and now."""
        return self.thread.now().on is True

    def outside_modules(
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
        token = self.thread.set(on, forced_off)
        try:
            yield
        except Exception as error:
            self.explain(error)
            raise
        finally:
            self.thread.reset(token)

    def mode(self) -> tuple[Any, Any]:
        """Return how this thread casts now, for `ThreadState.set`."""
        mode = self.thread.now()
        return mode.on, mode.forced_off

    @trace_as(_is_eligible_traced)
    def eligible(self, tensor: Tensor) -> bool:
        """Whether a tensor is of a dtype, device type and layout that is cast, and no autocast region casts."""
        return (
            tensor.dtype in CASTABLE_DTYPES
            # The first attribute takes a third of the time of the second.
            and (tensor.is_cpu if self.device_type == "cpu" else tensor.device.type == self.device_type)
            and tensor.layout in CASTABLE_LAYOUTS
            and not self.autocast_rules()
        )

    def autocast_rules(self) -> bool:
        """Whether this thread is in a torch.autocast region of this device type: there torch casts, and not we."""
        return is_any_autocast_enabled() and is_autocast_enabled(self.device_type)

    def note_autocast(self, device_type: str, *, enabled: bool) -> None:
        """Note that the program enters a torch.autocast region: nothing but `autocast_rules` follows from it."""

    def note_step(self) -> bool:
        """Note that an optimizer has stepped. Returns whether nothing follows from later steps."""
        return True

    def yield_to(self, whom: str, dtypes: Iterable[torch.dtype] = ()) -> None:
        """Note that the program casts by itself: nothing follows from it where casts do not follow modules.

        Args:
            whom: What it casts with: a class of torch or autoamp, or its half model.
            dtypes: The half dtypes that the program computes in, if they are known.
        """

    def to_half(self, value: Any) -> Any:
        """Cast one value, however nested, to the half dtype, but where torch casts."""
        return value if self.autocast_rules() else self._value_casters[self.dtype]((value,), False)[0]

    def to_fp32(self, value: Any) -> Any:
        """Cast one value, however nested, to fp32, but where torch casts."""
        return value if self.autocast_rules() else self._value_casters[torch.float32]((value,), False)[0]

    def promote_args(self, args: Sequence[Any], shares: bool = False) -> Sequence[Any]:
        """Cast a sequence of arguments to fp32, where the tensors that `eligible` admits have several dtypes."""
        dtypes = {tensor.dtype for tensor in iter_tensors(args) if self.eligible(tensor)}
        return self.args_to_fp32(args) if len(dtypes) > 1 else args
