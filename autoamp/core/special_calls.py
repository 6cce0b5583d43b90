"""Calls that need more than a cast of their arguments.

- Composite functions and TorchScript run under torch's own autocast for one call. CUDA's autocast casts within some
  functions, later and less than a cast of their arguments would, and compiled code of TorchScript calls ops below the
  functions that are replaced. A graph whose casts are decided runs as it is: one that was traced in this process, or
  that casts the second operand of a product to half itself, such as a weight. A trace does that, also one that was
  saved and loaded.
- Attention runs on a CPU in fp32 where torch's half kernel is slower, with a half result all the same. The lists'
  functions do so where they cast, and a function of its own does for half models, whose functions do not cast. The
  choice depends on the dtype and the shapes, never on whether gradients are recorded: a model computes the same bits
  while it trains and under `torch.no_grad`. Measured on an x86 CPU without AMX, one thread, heads of 64, casts
  included: with its backward pass attention in fp32 takes of bf16's time 0.25 at 32 tokens, 0.33 at 128, 0.5 at 256 to
  2,048, without it 0.6 to 0.9; on another one 0.32, 0.63, and 1.0 from 256 tokens on. Of fp16's it takes 0.2 or less,
  without the backward pass 0.5. Of a transformer's training step (width 512, 8 x 64 tokens) that is 10 %. Where the
  casts are most of it, it takes longer: 1.2 to 1.5 times for 2 x 4 heads and 4 tokens, and 3 to 20 times for one query
  of 1,024 keys, as in decoding.
- Recurrent layers have their input checked, and get a half copy of their weights in one flat tensor, in the layout that
  cuDNN takes as it is. Of weights that were cast one by one torch would make that layout at each call, with a copy of
  each and a warning.
- Losses on what a sigmoid in half precision made are warned of: their gradient is 0 where it rounds to 1.
- Ops write to what they are given: in-place forms, ``out=``, statistics of norms and the like. A cast makes a copy, and
  what the op writes to a copy is lost, so such arguments are left uncast, or what was written is copied back.
"""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter, RNNBase

from autoamp.core.casts import CastArgs, CastState, cast_call
from autoamp.errors import warn_user
from autoamp.tensors import HALF_DTYPES, PLAIN_TYPES, dtype_name, iter_tensors, map_tensors
from autoamp.torch_private import (
    dtype_of_node,
    flatten_recurrent_weights,
    in_function_mode,
    is_any_autocast_enabled,
    is_intercepted,
    is_known_true,
    is_transformed,
    schema_of,
    tracing_state,
)

RECURRENT_LAYERS = {torch.gru: "GRU", torch.lstm: "LSTM", torch.rnn_relu: "RNN_RELU", torch.rnn_tanh: "RNN_TANH"}
"""Torch's name of the kind of layer, by op, which `torch._VF` has too."""


@torch.no_grad()
def lay_out(weights: Sequence[Tensor], kind: str, count: int, bidirectional: bool, batch_first: bool) -> None:
    """Move the weights of a recurrent layer to one flat tensor, in cuDNN's layout.

    Args:
        weights: In the order of the op's argument.
        kind: The kind of layer, as in `RECURRENT_LAYERS`.
        count: How many layers there are.
        bidirectional: Whether each goes in both directions.
        batch_first: Whether the batch is the first dimension of the input.
    """
    # Of a layer in one direction: two or three with a projection, and two biases.
    each = len(weights) // (count * (2 if bidirectional else 1))
    gates = {"GRU": 3, "LSTM": 4}.get(kind, 1)
    with torch.cuda.device_of(weights[0]):
        flatten_recurrent_weights(
            weights, each, weights[0].shape[1], torch.backends.cudnn.rnn.get_cudnn_mode(kind),
            weights[0].shape[0] // gates, weights[each - 1].shape[0] if each in (3, 5) else 0, count, batch_first,
            bidirectional,
        )  # fmt: skip


@functools.cache
def flat_layout(
    dtype: torch.dtype, device: torch.device, shapes: tuple[torch.Size, ...], *layer: Any
) -> tuple[int, tuple[int, ...]]:
    """Return how many elements the flat tensor of a recurrent layer has, and where in it each weight begins.

    Args:
        dtype: The dtype of the weights.
        device: Their device.
        shapes: Their shapes.
        layer: The further arguments of `lay_out`, which moves empty weights here.
    """
    weights = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    lay_out(weights, *layer)
    size = weights[0].untyped_storage().nbytes() // weights[0].element_size()
    return size, tuple(int(weight.storage_offset()) for weight in weights)


def flatten_weights(module: RNNBase) -> None:
    """Move a recurrent layer's weights into one flat tensor, as cuDNN takes them. The parameters stay the same objects.

    `RNNBase.flatten_parameters` does so for other dtypes. It leaves bf16 alone, which cuDNN takes too, and would copy
    at each call. Where cuDNN would not take the weights they stay as they are.
    """
    module.flatten_parameters()
    weights: list[Any] = module._flat_weights
    if (
        all(type(weight) is Parameter and weight.dtype is torch.bfloat16 for weight in weights)
        and all(map(torch.cudnn_is_acceptable, weights))
        and len({weight.device for weight in weights}) == 1
        # A weight that stands in two places cannot lie in both.
        and len({weight.data_ptr() for weight in weights}) == len(weights)
    ):
        lay_out(weights, module.mode, module.num_layers, bool(module.bidirectional), module.batch_first)


# The numbers of fp16 and bf16 in TorchScript.
_HALF_NUMBERS = (5, 15)
_PRODUCT = re.compile("aten::(_?conv|linear|matmul|bilinear|(add|badd|b|addb)?mm$|(add)?mv$)|prim::ListConstruct")


def ops_named(*names: str) -> frozenset[Any]:
    """Return what torch's public namespaces have by these names."""
    owners = (torch, Tensor, torch.nn.functional, torch.linalg, torch.special)
    found = (getattr(owner, name, None) for owner in owners for name in names)
    return frozenset(op for op in found if op is not None)


COMPOSITES = ops_named(
    "cross_entropy", "cumulative_trapezoid", "inner", "ldexp", "sum_to_size", "trace", "trapezoid", "trapz"
)


def build_composite(original: Any, casts: CastState) -> Callable[..., Any]:
    """Build the way of one of `COMPOSITES`: torch's autocast is on, with its cache off, and as before afterwards.

    Args:
        original: One of `COMPOSITES`.
        casts: The casts of the handle.
    """

    def run_composite(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [arg for arg in (*args, *kwargs.values()) if type(arg) not in PLAIN_TYPES]
        if (
            "out" in kwargs
            or torch.compiler.is_dynamo_compiling()
            or is_any_autocast_enabled()
            or in_function_mode()
            or tracing_state() is not None
            or not all(type(arg) in (Tensor, Parameter) for arg in given)
            or not any(arg.dtype in HALF_DTYPES for arg in given)
            or not all(casts.eligible(arg) for arg in given if arg.dtype in HALF_DTYPES)
        ):
            return NotImplemented
        return run_in_autocast(casts, original, args, kwargs)

    return run_composite


def run_in_autocast(
    casts: CastState, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function with torch's autocast on, which is off around it, and without its cache of casts.

    Args:
        casts: The casts of the handle, whose half dtype and device type these are.
        function: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    device_type = casts.device_type
    cached, before = torch.is_autocast_cache_enabled(), torch.get_autocast_dtype(device_type)
    try:
        # What promotes within refuses a half dtype that is not autocast's own.
        torch.set_autocast_dtype(device_type, casts.dtype)
        torch.set_autocast_cache_enabled(False)
        torch.set_autocast_enabled(device_type, True)
        return function(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device_type, False)
        torch.set_autocast_cache_enabled(cached)
        torch.set_autocast_dtype(device_type, before)


def build_script_call(original: Any, casts: CastState) -> Any:
    """Build the replacement of the ``__call__`` of compiled functions or methods."""
    # A module keeps its compiled methods.
    known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not casts.wants(args, kwargs) or casts.autocast_rules():
            return original(self, *args, **kwargs)
        if self not in known:
            known[self] = _is_decided(self)
        if known[self]:
            return original(self, *args, **kwargs)
        return run_in_autocast(casts, original, (self, *args), kwargs)

    return call


def _is_decided(code: Any) -> bool:
    """Whether the casts in a compiled method or function are decided already."""
    graph = code.inlined_graph
    # The tracer alone knows the dtypes of values.
    # Frozen weights are constants, whose dtypes are known too.
    nodes = (node for node in graph.nodes() if node.kind() != "prim::Constant")
    if any(value.isCompleteTensor() for node in nodes for value in node.outputs()):
        return True
    # A dtype is a number; what comes in its place may be a device.
    given = ((node, node.inputsAt(1).toIValue()) for node in graph.findAllNodes("aten::to"))
    casts = (node for node, dtype in given if type(dtype) is int and dtype in _HALF_NUMBERS)
    uses = (use for node in casts for use in node.output().uses())
    return any(use.offset > 0 and _PRODUCT.match(use.user.kind()) for use in uses)


# How many products the scores of an attention have, where its casts begin to take less time than they save.
_FEWEST_PRODUCTS = 2**14
# So many queries are enough for any number of keys. Fewer are if there is one for so many keys.
_MANY_QUERIES = 32
_KEYS_A_QUERY = 8


def _is_fast_in_bf16(query: Tensor, key: Tensor) -> bool:
    """Whether the casts of an attention take longer than fp32 saves, as far as the sizes are known.

    Casts take time by the number of keys, and products by that times the number of queries: few queries of many keys,
    as in decoding with kept keys and values, stay in bf16.
    """
    queries, keys = query.size(-2), key.size(-2)
    if is_known_true(queries < _MANY_QUERIES) and not is_known_true(keys <= _KEYS_A_QUERY * queries):
        return True
    return is_known_true(query.numel() * keys < _FEWEST_PRODUCTS)


_NAMES = ("query", "key", "value")


def build_attention(original: Any, casts: CastState) -> Callable[..., Any] | None:
    """Build the way of `torch.nn.functional.scaled_dot_product_attention` on a CPU; None where half is as fast.

    Args:
        original: That function.
        casts: The casts of the handle.
    """
    in_fp16 = casts.dtype is torch.float16
    has = torch.cpu.get_capabilities()
    units = ("avx512_fp16", "amx_fp16") if in_fp16 else ("amx_bf16",)
    on_x86 = casts.device_type == "cpu" and str(has["architecture"]).startswith("x86")
    if not on_x86 or any(has.get(unit) for unit in units):
        return None

    def run_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[:3] if len(args) > 2 else (*args, *map(kwargs.get, _NAMES[len(args) :]))
        for one in given:
            # Missing ones, wrong ones and proxies go to torch.
            if not isinstance(one, Tensor) or one.is_nested or one.dim() < 2:
                return NotImplemented
        query = given[0]
        if not in_fp16 and _is_fast_in_bf16(query, given[1]):
            return NotImplemented
        # Where casts are off only a half model's attention comes in half.
        if not casts.eligible(query) or (query.dtype is torch.float32 and casts.thread.now().on is not True):
            return NotImplemented
        new, kwargs = cast_call(casts.args_to_fp32, args, kwargs)
        return original(*new, **kwargs).to(casts.dtype)

    return run_attention


def build_half_attention(original: Any, casts: CastState) -> Any:
    """Build the replacement of that function where no function casts, for half models."""
    in_fp32 = build_attention(original, casts)

    def attention(*args: Any, **kwargs: Any) -> Any:
        result = NotImplemented if in_fp32 is None else in_fp32(args, kwargs)
        return original(*args, **kwargs) if result is NotImplemented else result

    return attention


# How many arguments each of these ops takes, in both of its forms.
_ARGUMENTS = 9


class _FlatCopy(torch.autograd.Function):
    """Weights in another dtype, all in one tensor: one kernel casts them, and one their gradients."""

    @staticmethod
    def forward(ctx: Any, layout: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        # Elements between weights are never read, but a nan there would show in a check of the whole tensor.
        flat = torch.zeros(layout[0], dtype=dtype, device=weights[0].device)
        places = zip(layout[1], weights, strict=True)
        copies = tuple(flat.narrow(0, start, weight.numel()).view(weight.shape) for start, weight in places)
        torch._foreach_copy_(copies, weights)
        return copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wide = [torch.empty_like(grad, dtype=ctx.dtype) for grad in grads]
        torch._foreach_copy_(wide, grads)
        return None, None, *wide


def build_recurrent(original: Any, casts: CastState) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Build the way of one of `RECURRENT_LAYERS` under the policy fp16, on CUDA.

    Args:
        original: One of `RECURRENT_LAYERS`.
        casts: The casts of the handle.
    """
    kind = RECURRENT_LAYERS[original]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or torch.compiler.is_dynamo_compiling() or len(args) != _ARGUMENTS or is_intercepted():
            return NotImplemented
        # The op's other form takes a packed sequence, whose sizes come second.
        packed = isinstance(args[3], (list, tuple))
        place = 3 if packed else 2
        weights, count, bidirectional = args[place], args[place + 2], bool(args[place + 5])
        if not _can_lie_in_one(casts, weights, count * (2 if bidirectional else 1)):
            return NotImplemented
        given = casts.args_to_half(args[:place])
        if given[0].dtype is not casts.dtype or not torch.cudnn_is_acceptable(given[0]):
            return NotImplemented
        shapes = tuple(weight.shape for weight in weights)
        layer = kind, count, bidirectional, not packed and bool(args[8])
        layout = flat_layout(casts.dtype, weights[0].device, shapes, *layer)
        return original(*given, _narrowed(casts, weights, layout), *args[place + 1 :])

    return run


def _can_lie_in_one(casts: CastState, weights: Any, layers: int) -> bool:
    """Whether these are the weights of an ordinary recurrent layer, all in fp32 and to be cast."""
    return (
        isinstance(weights, (list, tuple))
        and all(type(weight) in (Parameter, Tensor) and weight.dtype is torch.float32 for weight in weights)
        and all(weight.is_contiguous() and casts.eligible(weight) and not is_transformed(weight) for weight in weights)
        and layers > 0
        and len(weights) in (2 * layers, 3 * layers, 4 * layers, 5 * layers)
        and weights[0].dim() == 2
    )


def _narrowed(casts: CastState, weights: Sequence[Tensor], layout: Any) -> list[Tensor]:
    """Return the weights in half, from one flat tensor: an earlier one where that still holds."""
    made: dict[int, Tensor] = {}

    def convert(weight: Tensor) -> Tensor:
        if not made:
            copies = _FlatCopy.apply(layout, casts.dtype, *weights)  # type: ignore[no-untyped-call]
            made.update(zip(map(id, weights), copies, strict=True))
        return made[id(weight)]

    cache, param_casts = casts.cache, casts.thread.param_casts
    parameters = [weight for weight in weights if type(weight) is Parameter]
    is_kept = cache.pins or (param_casts is not None and any(id(weight) in param_casts for weight in parameters))
    if len(parameters) < len(weights) or not is_kept:
        if param_casts is not None:
            # As with any other weight, casts are kept from the second use on.
            param_casts.update(dict.fromkeys(map(id, parameters)))
        return [convert(weight) for weight in weights]
    narrow = [cache.cast(weight, convert) for weight in parameters]
    # Where some of them were written to all are cast anew, since they have to lie in one tensor.
    return [convert(weight) for weight in weights] if made else narrow


def build_check_input(original: Any, casts: CastState) -> Any:
    """Build the replacement of ``nn.RNNBase.check_input``: every check of the original's but the one on dtypes.

    The layer's input may be in half precision beside fp32 weights, and the other way round, since both will be cast.
    """

    def check_input(self: Any, input: Tensor, batch_sizes: Tensor | None) -> Any:
        weight = self._flat_weights[0]
        if (
            input.dtype != weight.dtype
            and casts.thread.now().on is not False
            and casts.eligible(input)
            and casts.eligible(weight)
        ):
            # The original reads dtype and shape alone; a meta tensor has both and costs nothing.
            input = torch.empty(input.shape, dtype=weight.dtype, device="meta")
        return original(self, input, batch_sizes)

    return check_input


TAKE_PROBABILITIES = ops_named("binary_cross_entropy")
"""The losses in question."""

# Nodes of the graph that pass the values of their first input on.
_PASSED_ON = frozenset(
    f"{name}Backward{number}"
    for name in (
        "Alias", "AsStrided", "Cat", "Clamp", "Clone", "Expand", "Index", "Permute", "ReshapeAlias", "Select", "Slice",
        "Squeeze", "Stack", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
    for number in range(3)
)  # fmt: skip
_MAX_NODES = 12


def watch_sigmoids(original: Any, casts: CastState, name: str, remedy: str) -> Callable[..., Any]:
    """Return what calls a loss, and warns once if a sigmoid in half precision made the fp32 values that it gets.

    Such values are the output of a model whose outputs are cast to fp32, or of ``sigmoid(x).float()``.

    Args:
        original: One of `TAKE_PROBABILITIES`.
        casts: The casts of the handle.
        name: Its dotted name.
        remedy: What the list tells the caller to do.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if name not in casts.warned and casts.enabled and casts.yielded_to is None:
            half = _dtype_of_sigmoid(args[0] if args else kwargs.get("input"))
            if half is not None:
                casts.warned.add(name)
                warn_user(f"{name} is unsafe after a sigmoid in {dtype_name(half)}: {remedy}")
        return original(*args, **kwargs)

    return call


def _dtype_of_sigmoid(value: Any) -> torch.dtype | None:
    """Return the half dtype of the sigmoid that made a tensor; None if none did, or none in half precision."""
    node = getattr(value, "grad_fn", None)
    for _ in range(_MAX_NODES):
        if node is None:
            return None
        kind = node.name()
        if kind == "SigmoidBackward0":
            dtype = dtype_of_node(node)
            return dtype if dtype in HALF_DTYPES else None
        if kind not in _PASSED_ON:
            return None
        node = node.next_functions[0][0]
    return None


_STATISTICS = ("running_mean", "running_var")
_IN_PYTHON = {
    "batch_norm": _STATISTICS,
    "embedding": ("weight",),  # where max_norm= is given
    "embedding_bag": ("weight",),
    "instance_norm": _STATISTICS,
}
# Builtins whose schema tells what they write to: that of norms is silent.
_BY_SCHEMA = frozenset({"fused_moving_avg_obs_fake_quant"})


@dataclass(frozen=True, slots=True)
class Mutation:
    """What a function writes to.

    Attributes:
        parameters: The names of its parameters, in order.
        mutated: Those that it writes to, and that are cast for the call.
        uncast: Those that are never cast: what a method such as `Tensor.normal_` is there to write to.
        inplace: Whether it has a flag `inplace` that makes it write to its first argument.
    """

    parameters: tuple[str, ...]
    mutated: frozenset[str] = frozenset()
    uncast: frozenset[str] = frozenset()
    inplace: bool = False


def mutation_of(original: Any) -> Mutation | None:
    """Return what a function or method of torch writes to, None where that is nothing.

    In-place forms that have an out-of-place function beside them are not asked for here: they compute with that.
    """
    name = getattr(original, "__name__", "")
    in_python = isinstance(original, types.FunctionType)
    if in_python and not original.__module__.startswith("torch."):
        return None
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return Mutation(("self",), uncast=frozenset({"self"}))
    if not in_python:
        may_write = name.endswith(("_norm", "_counts", "_stats")) or name in _BY_SCHEMA
        op: Any = getattr(torch.ops.aten, name, None) if may_write else None
        arguments = schema_of(op.default).arguments if hasattr(op, "default") else ()
        mutated = {one.name for one in arguments if one.is_write or one.name in _STATISTICS}
        return Mutation(tuple(one.name for one in arguments), frozenset(mutated)) if mutated else None
    parameters = original.__code__.co_varnames[: original.__code__.co_argcount]
    if "inplace" in parameters:
        return Mutation(parameters, inplace=True)
    return Mutation(parameters, frozenset(_IN_PYTHON[name])) if name in _IN_PYTHON else None


def build_inplace(original: Any, functional: Any, cast_args: CastArgs) -> Callable[..., Any]:
    """Build the cast call of an in-place form: self keeps its dtype, and the value is computed as the list says.

    Args:
        original: The in-place form.
        functional: The function that computes the same out of place.
        cast_args: Casts arguments as the list says.
    """

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if not args:
            return original(*args, **kwargs)
        new, new_kwargs = cast_call(cast_args, args, kwargs)
        if new[0] is args[0]:
            return original(*new, **new_kwargs)
        value = functional(*new, **new_kwargs)
        # Where they do not fit, torch's own form grows self or says in its own words why it cannot.
        return args[0].copy_(value) if value.shape == args[0].shape else original(*args, **kwargs)

    return run


def build_mutating(
    original: Any, cast_args: CastArgs, casts: CastState, mutation: Mutation, *, to_half: bool
) -> Callable[..., Any]:
    """Build the cast call of a function that writes to its arguments.

    Args:
        original: The function, called once.
        cast_args: Casts arguments as the list says; what is not to be cast comes back as the same object.
        casts: The casts of the handle.
        mutation: What the function writes to.
        to_half: Whether the cast is one to half: what is mutated then stays in its own, wider dtype. A cast to
            fp32 is copied back after the call.
    """
    uncast, parameters, narrows = mutation.uncast, mutation.parameters, to_half and bool(mutation.mutated)
    if narrows:
        # Of a norm the weights too, since they go with its statistics.
        uncast = mutation.mutated | {"weight", "bias"}

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        new, new_kwargs = cast_call(cast_args, args, kwargs)
        # Both by the names of the parameters; arguments beyond these stay by position.
        given, call = dict(zip(parameters, args, strict=False)) | kwargs, dict(zip(parameters, new, strict=False))
        call |= new_kwargs
        first = parameters[0]
        if mutation.inplace and given.get("inplace") and call.get(first) is not given.get(first):
            # As an in-place form, the first argument keeps its dtype.
            return given[first].copy_(original(**{**call, "inplace": False}))
        call.update({name: given[name] for name in uncast & given.keys()})
        values = [call[name] for name in parameters[: len(args)]]
        result = original(*values, *new[len(values) :], **{name: call[name] for name in kwargs})
        for name in mutation.mutated & given.keys():
            if isinstance(given[name], Tensor) and call[name] is not given[name]:
                with torch.no_grad():
                    given[name].copy_(call[name])
        # With an uncast argument in fp32 the result may be fp32 too.
        return map_tensors(result, casts.to_half) if narrows else result

    return run


def into_out(
    original: Any,
    cast_args: CastArgs,
    casts: CastState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    to_half: bool,
) -> Any:
    """Make a call with ``out=``: computed as the list says, then written into ``out`` in its own dtype.

    A product is computed in the dtype of ``out``, as in place: half factors are widened for an fp32 one.
    """
    out, inputs = kwargs["out"], {key: value for key, value in kwargs.items() if key != "out"}
    if to_half:
        if isinstance(out, Tensor) and out.dtype is torch.float32 and casts.eligible(out):
            new, inputs = cast_call(casts.args_to_fp32, args, inputs)
            return original(*new, **inputs, out=out)
        return original(*args, **kwargs)
    tensors, outs = list(iter_tensors((args, kwargs))), list(iter_tensors(out))
    # torch refuses out= where a gradient is required, or where it is no tensor; the error is left to it.
    if not outs or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return original(*args, **kwargs)
    new, new_inputs = cast_call(cast_args, args, inputs)
    pairs = zip(iter_tensors((new, new_inputs)), iter_tensors((args, inputs)), strict=True)
    if (
        all(cast is given for cast, given in pairs)
        and len({tensor.dtype for tensor in tensors if casts.eligible(tensor)}) < 2
    ):
        return original(*args, **kwargs)
    result = original(*new, **new_inputs)
    values = list(iter_tensors(result))
    places = list(zip(outs, values, strict=False))
    fits = all(one.device == value.device and _kind(value.dtype) <= _kind(one.dtype) for one, value in places)
    if len(outs) != len(values) or not fits:
        return original(*args, **kwargs)
    for one, value in places:
        if one.shape != value.shape:
            one.resize_(value.shape)
        one.copy_(value)
    # Of the result's own kind, as torch returns it: a named tuple where there are several.
    written = iter(outs)
    return map_tensors(result, lambda _: next(written))


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    # Orders bool, integer, float, complex as torch.can_cast does, which a compiler does not trace.
    return dtype.is_complex, dtype.is_floating_point, dtype is not torch.bool
