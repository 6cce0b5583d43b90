"""From a policy to a replacement: a builder for each `CastPolicy`.

A replacement is a closure: it looks at its thread's state, casts what must be cast into new containers and calls the
original once. It never writes to an argument, but for ``out=`` and the self of an in-place form.
"""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.casting import RECURRENT_LAYERS, Casts, SparseArgument, cast_call, on_device
from autoamp.errors import BannedFunctionError, warn_user
from autoamp.inference import LSTM, build_lstm
from autoamp.ops.cudnn import build_recurrent
from autoamp.ops.products import BUILTINS, COMPOSITES, HALF_OPS, build_composite, build_to_half
from autoamp.ops.writes import build_mutating, mutation_of
from autoamp.patching import imitate
from autoamp.rules import CastPolicy
from autoamp.tensors import HALF_DTYPES, PLAIN_TYPES, iter_tensors, map_tensors
from autoamp.torch_private import flatten_recurrent_weights, is_any_autocast_enabled

__all__ = ["build_replacement"]

_CELLS = frozenset({torch.gru_cell, torch.lstm_cell, torch.rnn_relu_cell, torch.rnn_tanh_cell})
# Ops that take ``dtype``. Not cumsum: it keeps nothing for backward, where it would sum in half.
_NAMES = "cumprod", "log_softmax", "matrix_norm", "nanmean", "nansum", "norm", "prod", "softmax", "sum", "vector_norm"
_TAKE_DTYPE = frozenset(
    op
    for owner in (torch, Tensor, torch.nn.functional, torch.linalg, torch.special)
    for name in _NAMES
    if (op := getattr(owner, name, None)) is not None
)
# The orders of a norm whose gradient has no power in it, which in half would overflow; those of a matrix that go by
# singular values refuse halves.
_ORDERS = frozenset({None, "fro", 0, 1, 2, math.inf, -math.inf})
_MATRIX_ORDERS = frozenset({None, "fro", 1, -1, math.inf, -math.inf})
_ORDER_TYPES = frozenset({int, float, str, type(None)})
_OF_MATRICES = torch.linalg.matrix_norm, torch.linalg.norm


def build_replacement(
    original: Any,
    policy: CastPolicy,
    casts: Casts,
    *,
    module: str,
    qualname: str,
    functional: Any = None,
    remedy: str = "",
    allow_banned: bool = True,
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
    """
    if isinstance(original, (staticmethod, classmethod)):
        inner = build_replacement(
            original.__func__, policy, casts,
            module=module, qualname=qualname, remedy=remedy, allow_banned=allow_banned,
        )  # fmt: skip
        return type(original)(inner)
    if isinstance(original, types.ClassMethodDescriptorType):
        # A class method in C, as `torch.autograd.Function.apply` is from torch 2.14 on: it takes the class to call for.
        method = classmethod(lambda cls, *args, **kwargs: original.__get__(None, cls)(*args, **kwargs))
        return build_replacement(
            method, policy, casts, module=module, qualname=qualname, remedy=remedy, allow_banned=allow_banned
        )
    if policy is CastPolicy.BANNED:
        in_fp32 = _by_policy(original, CastPolicy.FP32, casts, functional)
        replacement = _banned(original, in_fp32, casts, f"{module}.{qualname}", remedy, allow_banned)
    else:
        replacement = _by_policy(original, policy, casts, functional)
    return imitate(replacement, original, module, qualname)


def _by_policy(original: Any, policy: CastPolicy, casts: Casts, functional: Any) -> Callable[..., Any]:
    cast_args = casts.args_to_half if policy is CastPolicy.FP16 else casts.args_to_fp32
    cast_all = casts.promote if policy is CastPolicy.PROMOTE else functools.partial(cast_call, cast_args)
    if functional is not None:
        return _inplace(original, functional, cast_all, casts)
    mutation, given = mutation_of(original), original
    if policy is CastPolicy.FP32 and not isinstance(original, BUILTINS):
        # fp32 is a promise on the whole of a composite function, whatever its body calls.
        original = casts.local.with_casts_off(original)
    if mutation is not None:
        return build_mutating(original, cast_all, casts, mutation, to_half=policy is CastPolicy.FP16)
    promotes = policy is CastPolicy.PROMOTE
    general = _promoting(original, casts) if promotes else _casting(original, policy, casts)
    if not isinstance(given, (*BUILTINS, types.FunctionType)):
        # No op of torch, and maybe an object that has no hash.
        return general
    if policy is CastPolicy.FP16:
        return _own_to_half(given, general, casts)
    if given in COMPOSITES and casts.device_type == "cuda":
        return build_composite(given, general, casts)
    if given in _TAKE_DTYPE and not promotes:
        return _converting(original, general, casts, given)
    return general


def _own_to_half(op: Any, general: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """The replacement of an op that has one of its own under the policy fp16; the general one of any other."""
    if op in HALF_OPS and casts.device_type in ("cpu", "cuda"):
        return build_to_half(op, general, casts)
    if op in _CELLS:
        return _keeping_at_once(general, casts)
    if op in RECURRENT_LAYERS and casts.device_type == "cuda" and flatten_recurrent_weights is not None:
        return build_recurrent(op, general, casts)
    if op is LSTM and casts.device_type == "cpu":
        return build_lstm(op, general, casts)
    return general


def _casting(original: Any, policy: CastPolicy, casts: Casts) -> Callable[..., Any]:
    """Every argument cast to one dtype. The hot path of most models: flat on purpose."""
    local, deviations, plain = casts.local, casts.deviations, PLAIN_TYPES
    half = policy is CastPolicy.FP16
    target = casts.dtype if half else torch.float32
    cast_args = casts.args_to_half if half else casts.args_to_fp32

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if deviations and not local.on:
            return passed(*args, **kwargs)
        # Many calls have nothing to cast: a loop that only looks saves a call, and a new list.
        for arg in args:
            kind = type(arg)
            if kind is Tensor:
                if arg.dtype is not target:
                    break
            elif kind not in plain:
                break
        else:
            if not kwargs:
                return original(*args)
            for value in kwargs.values():
                if type(value) not in plain:
                    break
            else:
                return original(*args, **kwargs)
        try:
            if not kwargs:
                return original(*cast_args(args))
            if kwargs.get("out") is not None:
                into_out = _product_into_out if half else _into_out
                return into_out(original, functools.partial(cast_call, casts.args_to_fp32), casts, args, kwargs)
            if kwargs.get("dtype") in HALF_DTYPES:
                # The caller chose; autocast heeds it too, and norms refuse to narrow what was cast to fp32.
                return original(*args, **kwargs)
            new = cast_args(args)
            for value in kwargs.values():
                if type(value) not in plain:
                    kwargs = dict(zip(kwargs, cast_args([*kwargs.values()]), strict=True))
                    break
        except SparseArgument:
            new, kwargs = casts.cast_with_sparse(args, kwargs, to_half=half)
        return original(*new, **kwargs)

    passed = casts.passing(original, replacement)
    return replacement


def _keeping_at_once(general: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """A cell of a recurrent layer: a module calls it in a loop, so that the casts of its weights are kept at once."""
    local, compiling = casts.local, torch.compiler.is_dynamo_compiling

    def replacement(*args: Any, **kwargs: Any) -> Any:
        entries = None if compiling() else local.entries
        if entries is not None:
            for arg in args:
                if type(arg) is Parameter:
                    # As if it had been cast before.
                    entries.setdefault(id(arg), None)
        return general(*args, **kwargs)

    return replacement


def _converting(original: Any, general: Callable[..., Any], casts: Casts, op: Any) -> Callable[..., Any]:
    """An op that takes ``dtype``, told to compute in fp32: it keeps its half argument for backward, and no cast of it.

    Args:
        original: What is called, which is ``op`` or calls it.
        general: The replacement that takes whatever is out of the ordinary.
        casts: The state that the replacement reads.
        op: One of `_TAKE_DTYPE`.
    """
    local, deviations, here = casts.local, casts.deviations, on_device(casts.device_type)
    any_autocast, strided = is_any_autocast_enabled, torch.strided
    most, is_norm = _arguments_before_dtype(op), op.__name__.endswith("norm")

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if deviations and not local.on:
            return passed(*args, **kwargs)
        if (
            not args
            or type(args[0]) is not Tensor
            or args[0].dtype not in HALF_DTYPES
            or kwargs.get("out") is not None
            or (len(args) > most and args[most] is None)
            or args[0].layout is not strided
            or not here(args[0])
            or any_autocast()
            or (is_norm and not _keeps_half(op, args, kwargs))
        ):
            return general(*args, **kwargs)
        # What the caller asks for is heeded, as under autocast.
        if len(args) <= most and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        return original(*args, **kwargs)

    passed = casts.passing(original, replacement)
    return replacement


def _keeps_half(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a norm takes a half argument, and has its gradient in range."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    of_matrix = op in _OF_MATRICES and type(dim) is not int and args[0].dim() > 1
    return type(order) in _ORDER_TYPES and order in (_MATRIX_ORDERS if of_matrix else _ORDERS)


def _arguments_before_dtype(op: Any) -> int:
    """Return how many positional arguments an op of `_TAKE_DTYPE` may be given where ``dtype`` is yet to come."""
    if isinstance(op, types.FunctionType):
        return op.__code__.co_varnames.index("dtype")
    # Of builtins those of softmax take it by position, the others by name alone.
    return 2 if op.__name__.endswith("softmax") else sys.maxsize


def _promoting(original: Any, casts: Casts) -> Callable[..., Any]:
    """Arguments of different floating dtypes go to the widest."""
    promote, local, deviations = casts.promote, casts.local, casts.deviations

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if deviations and not local.on:
            return passed(*args, **kwargs)
        if not kwargs and _of_one_dtype(args):
            return original(*args, **kwargs)
        try:
            if kwargs.get("out") is not None:
                return _into_out(original, promote, casts, args, kwargs)
            new, new_kwargs = promote(args, kwargs)
        except SparseArgument:
            new, new_kwargs = casts.cast_with_sparse(args, kwargs, to_half=False)
        return original(*new, **new_kwargs)

    passed = casts.passing(original, replacement)
    return replacement


def _of_one_dtype(args: tuple[Any, ...]) -> bool:
    """Tell at a glance whether all tensors have one dtype. False may be wrong."""
    found = None
    for arg in args:
        kind = type(arg)
        for item in arg if kind is list or kind is tuple else (arg,):
            kind = type(item)
            if kind is Tensor or kind is Parameter:
                if found is None:
                    found = item.dtype
                elif item.dtype is not found:
                    return False
            elif kind not in PLAIN_TYPES:
                return False
    return True


def _inplace(original: Any, functional: Any, cast_all: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """An in-place form: self keeps its dtype, and the value is computed as the list says."""
    local, deviations, copy_ = casts.local, casts.deviations, Tensor.copy_

    def replacement(*args: Any, **kwargs: Any) -> Any:
        # First of all: optimizers call these for each parameter, with casts off.
        if deviations and not local.on:
            return passed(*args, **kwargs)
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if not args:
            return original(*args, **kwargs)
        try:
            new, new_kwargs = cast_all(args, kwargs)
        except SparseArgument:
            new, new_kwargs = casts.cast_with_sparse(args, kwargs, to_half=False)
        if new[0] is args[0]:
            return original(*new, **new_kwargs)
        value = functional(*new, **new_kwargs)
        # Where they do not fit, torch's own form grows self or says in its own words why it cannot.
        return copy_(args[0], value) if value.shape == args[0].shape else original(*args, **kwargs)

    passed = casts.passing(original, replacement)
    return replacement


def _banned(
    original: Any, in_fp32: Any, casts: Casts, name: str, remedy: str, allow_banned: bool
) -> Callable[..., Any]:
    """A function whose result in half precision cannot be trusted."""
    local, deviations = casts.local, casts.deviations

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if deviations and not local.on:
            return passed(*args, **kwargs)
        if not any(tensor.dtype in HALF_DTYPES and casts.eligible(tensor) for tensor in iter_tensors((args, kwargs))):
            return original(*args, **kwargs)
        if not allow_banned:
            raise BannedFunctionError(
                f"{name} is banned in half precision: {remedy}; or init(allow_banned=True), which runs it in fp32"
            )
        if name not in casts.warned:
            casts.warned.add(name)
            warn_user(f"{name} is unsafe in half precision and runs in fp32: {remedy}")
        return in_fp32(*args, **kwargs)

    passed = casts.passing(original, replacement)
    return replacement


def _into_out(
    original: Any, cast_all: Callable[..., Any], casts: Casts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A call with ``out=``: computed as the list says, then written into ``out`` in its own dtype."""
    inputs = {key: value for key, value in kwargs.items() if key != "out"}
    tensors = list(iter_tensors((args, kwargs)))
    outs = list(iter_tensors(kwargs["out"]))
    # torch refuses out= where a gradient is required, or where it is no tensor; the error is left to it.
    if not outs or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return original(*args, **kwargs)
    new, new_inputs = cast_all(args, inputs)
    pairs = zip(iter_tensors((new, new_inputs)), iter_tensors((args, inputs)), strict=True)
    if (
        all(cast is given for cast, given in pairs)
        and len({tensor.dtype for tensor in tensors if casts.eligible(tensor)}) < 2
    ):
        return original(*args, **kwargs)
    result = original(*new, **new_inputs)
    values = list(iter_tensors(result))
    if len(outs) != len(values) or not all(map(_can_hold, outs, values)):
        return original(*args, **kwargs)
    for out, value in zip(outs, values, strict=True):
        if out.shape != value.shape:
            out.resize_(value.shape)
        out.copy_(value)
    # Of the result's own kind, as torch returns it: a named tuple where there are several.
    written = iter(outs)
    return map_tensors(result, lambda _: next(written))


def _product_into_out(
    original: Any, widen_all: Callable[..., Any], casts: Casts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A product with ``out=``, computed in the dtype of that, as in place: half factors are widened for an fp32 one."""
    out = kwargs["out"]
    if isinstance(out, Tensor) and out.dtype is torch.float32 and casts.eligible(out):
        args, kwargs = widen_all(args, kwargs)
    return original(*args, **kwargs)


def _can_hold(out: Tensor, value: Tensor) -> bool:
    return out.device == value.device and _kind(value.dtype) <= _kind(out.dtype)


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    # Orders bool, integer, float, complex as torch.can_cast does, which a compiler does not trace.
    return dtype.is_complex, dtype.is_floating_point, dtype is not torch.bool
