"""From a policy to a replacement: what casts the arguments of a call, and what calls the original once.

A replacement never writes to an argument, but for ``out=`` and the self of an in-place form. Ops of torch that need
more than their policy says are in tables here. `Registry` holds policies for functions that no list names: decorators,
and registrations by module and name.

Some calls are torch's own until torch refuses their dtypes; then they are made once more, with other dtypes. So a call
that torch takes costs one Python frame and gives the same bits as without autoamp. torch checks dtypes before it writes
to an argument or draws a random number. A compiler does not run the call, so traced code decides by the dtypes alone.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.core.casts import (
    CASTABLE_DTYPES,
    CastArgs,
    CastState,
    ThreadState,
    TracedMode,
    cast_call,
    dtype_with_sparse,
)
from autoamp.core.inference import PACKED, build_packed
from autoamp.core.patches import check_writable, imitate, mark, traceable_method
from autoamp.core.rules import CastPolicy, CastRule, RuleSource, did_you_mean
from autoamp.core.special_calls import (
    COMPOSITES,
    RECURRENT_LAYERS,
    TAKE_PROBABILITIES,
    build_attention,
    build_composite,
    build_half_attention,
    build_inplace,
    build_mutating,
    build_recurrent,
    into_out,
    mutation_of,
    ops_named,
    watch_sigmoids,
)
from autoamp.core.targets import Target, target_at
from autoamp.errors import BannedFunctionError, ListFileError, PatchError, TargetError, warn_user
from autoamp.tensors import CASTABLE_LAYOUTS, HALF_DTYPES, iter_tensors, map_tensors
from autoamp.torch_private import (
    OpOverloadPacket,
    is_any_autocast_enabled,
    start_no_graph,
    trace_instead,
    traced_in_place_of,
)

# Not every exception: torch ends a checkpoint's recomputation by one of its own.
_REFUSALS = RuntimeError, TypeError, ValueError

FALLBACKS = frozenset({CastPolicy.HALF_IF_MIXED, CastPolicy.FP32_IF_REFUSED})
"""The policies of these calls."""

Retry = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Calls a function with the arguments in other dtypes; NotImplemented where their dtypes give no reason to."""


def build_retry(policy: CastPolicy, original: Any, functional: Any) -> Retry:
    """Build what makes a call again.

    Args:
        policy: One of `FALLBACKS`.
        original: What is called. What it writes to, as an in-place form or with ``out=``, keeps its dtype.
        functional: For an in-place form the out-of-place function that computes the same.
    """
    name = getattr(original, "__name__", "")
    writes_first = functional is not None or name == "__setitem__" or (name[-1:] == "_" and name[-2:] != "__")
    to_half = policy is CastPolicy.HALF_IF_MIXED

    def retry(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [one for one in iter_tensors((args, kwargs)) if one.dtype in CASTABLE_DTYPES]
        target = _half_of(tensors)
        if target is None or (to_half and all(one.dtype is target for one in tensors)):
            return NotImplemented
        written: Any = args[0] if writes_first and args else kwargs.get("out")
        if not to_half:
            target = torch.float32
        elif isinstance(written, Tensor):
            target = written.dtype
        elif any(one.layout not in CASTABLE_LAYOUTS for one in tensors):
            target = dtype_with_sparse(tensors, target)
        new_args, new_kwargs = map_tensors(
            (args, {key: value for key, value in kwargs.items() if key != "out"}),
            lambda one: one.to(target) if one.dtype in CASTABLE_DTYPES and one is not written else one,
        )
        if not to_half and writes_first:
            return written.copy_(functional(new_args[0].to(target), *new_args[1:], **new_kwargs))
        return call(*new_args, **new_kwargs, **({"out": kwargs["out"]} if "out" in kwargs else {}))

    return retry


def _half_of(tensors: list[Tensor]) -> torch.dtype | None:
    """Return the half dtype among tensors; None where there is none, or both are."""
    found: torch.dtype | None = None
    for one in tensors:
        if one.dtype is not torch.float32:
            if found is not None and found is not one.dtype:
                return None
            found = one.dtype
    return found


def build_fallback(call: Callable[..., Any], retry: Retry, casts: CastState, active: Any) -> Callable[..., Any]:
    """Build the replacement of a function under one of `FALLBACKS`.

    Args:
        call: What it calls first.
        retry: Makes a call that torch has refused again.
        casts: The casts of the handle.
        active: What `ThreadMode.on` is where the rule acts.
    """
    local, compiling = casts.thread, torch.compiler.is_compiling
    traced = build_traced_fallback(call, retry, local, active)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        try:
            # Where torch.export traces, a refused call would stay in the graph.
            return traced(*args, **kwargs) if compiling() else call(*args, **kwargs)
        except _REFUSALS as refusal:
            if local.mode.on is not active:
                raise
            try:
                result = retry(call, args, kwargs)
            except Exception as error:
                # What is wrong beside the dtypes, such as a shape.
                error.__suppress_context__ = True
                casts.explain(error)
                raise
            if result is NotImplemented:
                casts.explain(refusal)
                raise
            return result

    return replacement


def build_traced_fallback(
    call: Callable[..., Any], retry: Retry, local: ThreadState | TracedMode, active: Any
) -> Callable[..., Any]:
    """Build what a compiler traces in place of `build_fallback`'s replacement. It decides by the dtypes alone."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        result = retry(call, args, kwargs) if local.mode.on == active else NotImplemented
        return call(*args, **kwargs) if result is NotImplemented else result

    return traced


_BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# Torch's own, whatever stands in its place while replacements are built.
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_CELLS = ops_named("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell")
# Ops that take ``dtype``. Not cumsum: it keeps nothing for backward, where it would sum in half.
_TAKE_DTYPE = ops_named(
    "cumprod",
    "log_softmax",
    "matrix_norm",
    "nanmean",
    "nansum",
    "norm",
    "prod",
    "rand_like",
    "randint_like",
    "randn_like",
    "softmax",
    "sum",
    "vector_norm",
)
# The orders of a norm whose gradient has no power in it, which in half would overflow; those of a matrix that go by
# singular values refuse halves.
_ORDERS = frozenset({None, "fro", 0, 1, 2, math.inf, -math.inf})
_MATRIX_ORDERS = frozenset({None, "fro", 1, -1, math.inf, -math.inf})
_ORDER_TYPES = frozenset({int, float, str, type(None)})
_OF_MATRICES = torch.linalg.matrix_norm, torch.linalg.norm

# How calls under a policy are counted, in `CastCounts.calls`.
_COUNTED_AS = {
    CastPolicy.FP16: "half",
    CastPolicy.FP32: "fp32",
    CastPolicy.BANNED: "fp32",
    CastPolicy.PROMOTE: "promote",
}

SpecialCase = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Makes a call in an op's own way, with ``args`` and ``kwargs``; NotImplemented where it is made as any op's."""


def build_replacement(
    original: Any,
    policy: CastPolicy,
    casts: CastState,
    *,
    module: str,
    qualname: str,
    functional: Any = None,
    remedy: str = "",
    allow_banned: bool = True,
    active: Any = True,
    elsewhere: Any = None,
) -> Any:
    """Build the replacement of ``original`` under a policy.

    Args:
        original: A function, builtin, method descriptor, staticmethod or classmethod.
        policy: Any policy but ``none``.
        casts: The state that the replacement reads.
        module: The module by which a builtin's replacement is pickled.
        qualname: Its name there.
        functional: For an in-place form the out-of-place function it computes with.
        remedy: What a banned function's message tells the caller to do.
        allow_banned: Whether a banned function with half arguments runs in fp32 with a warning, or raises
            `BannedFunctionError`.
        active: What `ThreadMode.on` is where the policy acts.
        elsewhere: What is called where it does not, by default the original.
    """
    wrap: Any = None
    given = original
    if isinstance(original, (staticmethod, classmethod)):
        wrap, original = type(original), original.__func__
        elsewhere = getattr(elsewhere, "__func__", None)
    elif isinstance(original, types.ClassMethodDescriptorType):
        # A class method in C, as `torch.autograd.Function.apply` is from torch 2.14 on: it takes the class to call for.
        descriptor, wrap = original, classmethod
        original = lambda cls, *args, **kwargs: descriptor.__get__(None, cls)(*args, **kwargs)  # noqa: E731
    cast_args: Any = {
        CastPolicy.FP16: casts.args_to_half,
        CastPolicy.FP32: casts.args_to_fp32,
        CastPolicy.PROMOTE: casts.promote_args,
    }.get(policy)
    if policy is CastPolicy.BANNED:
        cast_args = _banned_caster(casts, f"{module}.{qualname}", remedy, allow_banned)
    mutation = mutation_of(original)
    # fp32 is a promise on the whole of a composite function, whatever its body calls.
    is_builtin, wide = isinstance(original, _BUILTINS), policy in (CastPolicy.FP32, CastPolicy.BANNED)
    off_within = wide and functional is None and not is_builtin

    def build(call: Any, functional: Any, local: Any, off_within: bool, elsewhere: Any) -> Callable[..., Any]:
        if policy in FALLBACKS:
            return _build_fallback(original, elsewhere or call, policy, casts, functional, local, active)
        special_case = _special_case(original, call, policy, cast_args, casts, functional, mutation)
        # Traced code is free of side effects.
        count = None if isinstance(local, TracedMode) else casts.counts.calls[_COUNTED_AS[policy]]
        to_half = policy is CastPolicy.FP16
        return _cast_and_call(
            call, cast_args, casts, special_case, to_half, off_within, local, active, elsewhere, count
        )

    # Dynamo traces another one, which sets nothing when it runs.
    call = traceable_method(original)
    call = casts.thread.with_mode(call, False) if off_within else call
    watched = original
    if policy is CastPolicy.BANNED and isinstance(original, types.FunctionType) and original in TAKE_PROBABILITIES:
        watched = watch_sigmoids(original, casts, f"{module}.{qualname}", remedy)
    traced_elsewhere = None if elsewhere is None else traced_in_place_of(elsewhere)
    out_of_place = None if functional is None else traceable_method(functional)
    traced = mark(build(call, out_of_place, casts.thread.traced, False, traced_elsewhere), original)
    replacement = trace_instead(build(watched, functional, casts.thread, off_within, elsewhere), traced)
    replacement = imitate(replacement, original, module, qualname)
    if isinstance(original, OpOverloadPacket):
        # Compiled code calls one of the overloads, which are attributes of an op of torch.ops.
        for name in (*original.overloads(), "overloads", "op_overloads", "op"):
            setattr(replacement, name, getattr(original, name))
    if is_builtin:
        # In Python that Dynamo skips, such as recurrent layers, torch compiles no op by itself. Inductor cannot: it
        # fails where it trains `torch.lstm` on a CPU.
        start_no_graph(replacement)
    return replacement if wrap is None else mark(wrap(replacement), given)


def _build_fallback(
    original: Any, call: Any, policy: CastPolicy, casts: CastState, functional: Any, local: Any, active: Any
) -> Callable[..., Any]:
    """Build what stands in for an original under one of `FALLBACKS`; ``call`` is what it calls."""
    if original is _ATTENTION and not casts.on_by_default:
        # As where no list has it: `unlisted_functions`.
        call = build_half_attention(call, casts)
    retry = build_retry(policy, original, functional)
    traced = isinstance(local, TracedMode)
    return build_traced_fallback(call, retry, local, active) if traced else build_fallback(call, retry, casts, active)


def _cast_and_call(
    original: Any,
    cast_args: CastArgs,
    casts: CastState,
    special_case: SpecialCase | None,
    to_half: bool,
    off_within: bool,
    local: ThreadState | TracedMode,
    active: Any,
    elsewhere: Any,
    count: list[int] | None,
) -> Callable[..., Any]:
    """Return what stands in for an original, whatever the policy: it casts every argument and calls.

    Args:
        original: What it calls once.
        cast_args: Casts arguments as the policy says.
        casts: The state that is asked.
        special_case: The op's own way.
        to_half: Whether the policy is fp16.
        off_within: Whether casts are off while the original runs.
        local: Has the switches that are asked: `CastState.thread`, or what traced code reads in its place.
        active: What the first switch is where the policy acts.
        elsewhere: What is called where it does not; None for what the handle's casts say.
        count: The number of calls, its one element; None to count none.
    """
    compiling, any_autocast = torch.compiler.is_dynamo_compiling, is_any_autocast_enabled
    # On a CPU the way of these is packed weights, and there are none while no weights are pinned.
    special_case_applies: Any = (special_case,) if special_case else ()
    if special_case and casts.device_type == "cpu" and original in PACKED:
        special_case_applies = casts.cache.pins

    def replacement(*args: Any, **kwargs: Any) -> Any:
        mode = local.mode
        if mode.on is not active:
            return outside_modules(*args, **kwargs)
        if off_within:
            # `ThreadState.set` written out: most losses and norms come here, and each call of Python's counts.
            own_mode = vars(mode)
            before = own_mode.get("on")
            own_mode["on"] = False
        try:
            if any_autocast() and casts.autocast_rules():
                # Torch casts.
                return original(*args, **kwargs)
            if count is not None:
                count[0] += 1
            if special_case_applies and special_case is not None:
                result = special_case(args, kwargs)
                if result is not NotImplemented:
                    return result
            if not kwargs:
                return original(*cast_args(args))
            if kwargs.get("out") is not None:
                return into_out(original, cast_args, casts, args, kwargs, to_half=to_half)
            # A half dtype is the caller's choice: autocast heeds it too, and norms refuse to narrow.
            new = (args, kwargs) if kwargs.get("dtype") in HALF_DTYPES else cast_call(cast_args, args, kwargs)
            return original(*new[0], **new[1])
        except Exception as error:
            if not compiling():
                casts.explain(error)
            raise
        finally:
            if off_within:
                if before is None:
                    # The thread had set nothing, and goes by the default again.
                    del own_mode["on"]
                else:
                    own_mode["on"] = before

    outside_modules = elsewhere
    if elsewhere is None:
        outside_modules = casts.outside_modules(original, replacement, local) if casts.in_modules else original
    return replacement


def _special_case(
    original: Any, call: Any, policy: CastPolicy, cast_args: CastArgs, casts: CastState, functional: Any, mutation: Any
) -> SpecialCase | None:
    """Return the way of an op that needs more than its policy says; None for any other. It calls ``call``."""
    to_half, on_cuda = policy is CastPolicy.FP16, casts.device_type == "cuda"
    if functional is not None:
        return build_inplace(call, functional, cast_args)
    if mutation is not None:
        return build_mutating(call, cast_args, casts, mutation, to_half=to_half)
    if not isinstance(original, (*_BUILTINS, types.FunctionType)):
        # No op of torch, and maybe an object that has no hash.
        return None
    if to_half:
        if original in _CELLS:
            return _precache_weights(casts)
        if original is _ATTENTION:
            return build_attention(original, casts)
        if original in RECURRENT_LAYERS and on_cuda:
            return build_recurrent(original, casts)
        if original is torch.einsum:
            # Without sums of products half precision gains nothing, and it promotes.
            promote = casts.promote_args
            return lambda args, kwargs: NotImplemented if kwargs or _contracts(args) else original(*promote(args))
        return build_packed(original, casts)
    if original in COMPOSITES and policy is not CastPolicy.BANNED and on_cuda:
        return build_composite(original, casts)
    return _pass_fp32_dtype(original, call, casts) if original in _TAKE_DTYPE and policy is CastPolicy.FP32 else None


def _banned_caster(casts: CastState, name: str, remedy: str, allow_banned: bool) -> CastArgs:
    """Return what casts to fp32 for a function whose result in half precision cannot be trusted, with a warning."""

    def cast_args(args: Sequence[Any], shares: bool = False) -> Sequence[Any]:
        if not any(tensor.dtype in HALF_DTYPES and casts.eligible(tensor) for tensor in iter_tensors(args)):
            return args
        if not allow_banned:
            raise BannedFunctionError(
                f"{name} is banned in half precision: {remedy}; or init(allow_banned=True), which runs it in fp32"
            )
        if name not in casts.warned:
            casts.warned.add(name)
            warn_user(f"{name} is unsafe in half precision and runs in fp32: {remedy}")
        return casts.args_to_fp32(args)

    return cast_args


def _contracts(args: tuple[Any, ...]) -> bool:
    """Whether an einsum sums products: an index of several operands that its result lacks.

    An index of one operand alone is summed before anything is multiplied, and torch sums in fp32.

    Args:
        args: An equation and operands. With lists of indices in place of an equation the answer is no: such a call is
            rare, and promotes.
    """
    if not args or not isinstance(args[0], str):
        return False
    inputs, arrow, output = args[0].replace(" ", "").replace("...", ".").partition("->")
    indices, tensors = inputs.split(","), args[1:]
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = tuple(tensors[0])
    if len(tensors) != len(indices) or not all(isinstance(one, Tensor) for one in tensors):
        return True  # torch raises an error
    several: list[str] = []
    seen: list[str] = []
    for operand, tensor in zip(indices, tensors, strict=True):
        for index in dict.fromkeys(operand):
            # An ellipsis is an index where it stands for any dimensions.
            if index == "." and tensor.dim() < len(operand):
                continue
            (several if index in seen else seen).append(index)
    # A result that is not given has all of an ellipsis, and the indices that come once.
    kept = output if arrow else "."
    return any(index not in kept for index in several)


def _precache_weights(casts: CastState) -> SpecialCase:
    """Return the way of a cell of a recurrent layer: a module calls it in a loop, so its casts are kept at once."""

    def keep(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        param_casts: Any = None if torch.compiler.is_dynamo_compiling() else casts.thread.param_casts
        for arg in () if param_casts is None else args:
            if type(arg) is Parameter:
                # As if it had been cast before.
                param_casts.setdefault(id(arg), None)
        return NotImplemented

    return keep


def _pass_fp32_dtype(op: Any, call: Any, casts: CastState) -> SpecialCase:
    """Return the way of an op that takes ``dtype``: it computes in fp32 and keeps a half argument for backward, uncast.

    Args:
        op: One of `_TAKE_DTYPE`.
        call: What calls it.
        casts: The casts of the handle.
    """
    is_norm = op.__name__.endswith("norm")
    # How many positional arguments come before ``dtype``. Of builtins softmax takes it by position, others by name.
    most = 2 if op.__name__.endswith("softmax") else sys.maxsize
    if isinstance(op, types.FunctionType):
        most = op.__code__.co_varnames.index("dtype")

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            not args
            or type(args[0]) is not Tensor
            or args[0].dtype not in HALF_DTYPES
            or not casts.eligible(args[0])
            or kwargs.get("out") is not None
            or (len(args) > most and args[most] is None)
            or (is_norm and not _keeps_half(op, args, kwargs))
        ):
            return NotImplemented
        # A dtype that the caller gives is heeded, as under autocast.
        given = len(args) > most or kwargs.get("dtype") is not None
        return call(*args, **(kwargs if given else {**kwargs, "dtype": torch.float32}))

    return run


def _keeps_half(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a norm takes a half argument, and has its gradient in range."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    of_matrix = op in _OF_MATRICES and type(dim) is not int and args[0].dim() > 1
    return type(order) in _ORDER_TYPES and order in (_MATRIX_ORDERS if of_matrix else _ORDERS)


# A decorator returns what it was given: its parameters, overloads and descriptors stay known to type checkers.
_Function = TypeVar("_Function", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")


class _Decorated:
    """A decorated function, and ``current``, what a call of it runs.

    That is the replacement for the handle that was activated last. It passes calls through while that handle is not
    active.
    """

    def __init__(self, function: Any, policy: CastPolicy) -> None:
        self._function = function
        self._policy = policy
        self.current = function

    def build(self, casts: CastState) -> None:
        function = self._function
        name = getattr(function, "__qualname__", type(function).__name__)
        self.current = build_replacement(function, self._policy, casts, module=str(function.__module__), qualname=name)


def check_decorated(function: Any, decorator: str) -> None:
    """Raise TypeError for what no decorator can take: a class, or a function that runs later, as a generator does."""
    if not callable(function):
        raise TypeError(f"{function!r} is not callable; a {decorator} decorator takes a function")
    if isinstance(function, type):
        raise TypeError(f"{function.__name__} is a class; decorate its method, such as forward")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError(f"{function!r} runs after the call has returned; decorate the functions that it calls")


class Registry:
    """The decorated functions and the registrations of this process. They outlast handles.

    Args:
        lock: Held while handles come and go.

    Attributes:
        rules: The registrations, by the ``id`` of the module and the name in it.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._decorated: weakref.WeakSet[_Decorated] = weakref.WeakSet()
        self._casts: CastState | None = None
        self.rules: dict[tuple[int, str], tuple[Any, CastRule]] = {}

    def decorate(self, function: _Function, policy: CastPolicy) -> _Function:
        """Wrap a function so that each call follows the handle that is active then.

        Args:
            function: A function, builtin, bound method, callable object, staticmethod or classmethod.
            policy: What happens to its arguments.

        Raises:
            TypeError: This is no function, or a class, generator function or coroutine function.
        """
        if isinstance(function, (staticmethod, classmethod)):
            return type(function)(self.decorate(function.__func__, policy))
        check_decorated(function, policy.value)
        decorated = _Decorated(function, policy)
        with self._lock:
            self._decorated.add(decorated)
            if self._casts is not None:
                decorated.build(self._casts)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return decorated.current(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    def use(self, casts: CastState) -> None:
        """Let all decorated functions follow a handle's casts from now on."""
        self._casts = casts
        for decorated in list(self._decorated):
            decorated.build(casts)

    def add(self, module: Any, name: str, policy: CastPolicy) -> Target:
        """Register ``module.name``, in place of an earlier registration of the same.

        Raises:
            TargetError: There is no such name, or it is nothing that can be patched.
        """
        where = getattr(module, "__name__", type(module).__name__)
        if not isinstance(name, str) or not hasattr(module, name):
            raise TargetError(f"no function named {name!r} in {where!r}; {did_you_mean(name, dir(module))}")
        rule = CastRule(f"{where}.{name}", policy, RuleSource(f"register_{policy.value}_function", None, False))
        try:
            target = target_at(module, name, rule)
            check_writable(target.parent, target.attribute)
        except (ListFileError, PatchError) as error:
            raise TargetError(f"{rule.target!r} cannot be registered: {error}") from error
        self.rules.pop((id(module), name), None)
        self.rules[id(module), name] = (module, rule)
        return target

    def targets(self) -> tuple[Target, ...]:
        """Return what is registered, in order, but for names that are gone: those are warned of."""
        found = []
        for (_, name), (module, rule) in self.rules.items():
            try:
                found.append(target_at(module, name, rule))
            except (ListFileError, AttributeError) as error:
                warn_user(f"the registration of {rule.target!r} has no effect: {error}")
        return tuple(found)
