"""Every private name of torch that autoamp uses: looked up here, once, each with a way to do without it.

A release of torch may rename or drop what begins with an underscore. No other file of the package uses such a name, so
this file shows what may break, and `MISSING` what the installed torch lacks. Torch keeps what saved models and other
packages depend on, so that has no other way: operators of ATen, their class, and the base classes of modes and norms.
Other files use two such names: the multi-tensor functions ``torch._foreach_*``, and ``Tensor._version``.

Torch's functions are exported as the objects that they are, since compilers know them by identity.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map as tree_map

ASKED: list[str] = []
"""All of these names, in the order in which they were looked up."""

MISSING: list[str] = []
"""Those among them that the installed torch lacks."""


def _find(path: str, otherwise: Any) -> Any:
    """Return the object at a dotted path, importing modules on the way; ``otherwise`` where there is none."""
    ASKED.append(path)
    parts = path.split(".")
    found: Any = torch
    for number, name in enumerate(parts[1:], start=2):
        if not hasattr(found, name):
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join(parts[:number]))
        try:
            found = getattr(found, name)
        except (AttributeError, RuntimeError):
            # RuntimeError: torch.ops has no such operator, or no such overload.
            MISSING.append(path)
            return otherwise
    return found


def _both(one: str, other: str) -> tuple[Any, Any]:
    """Return the objects at two paths, of which neither is of use alone; None twice where one is missing."""
    found = _find(one, None), _find(other, None)
    return (None, None) if None in found else found


# -- the state of a thread. Where a name is missing, the answer is the one for which callers take the general way --


def _tracing() -> bool | None:
    jit: Any = torch.jit
    return jit.is_tracing() or None


is_autocast_enabled = torch.is_autocast_enabled
"""Torch's own: the function that torch has under this name while a handle is active answers for the handle's casts."""

is_any_autocast_enabled: Callable[[], bool] = _find(
    "torch._C._is_any_autocast_enabled", lambda: any(map(is_autocast_enabled, ("cpu", "cuda", "mps", "xpu")))
)
"""Whether this thread is in a ``torch.autocast`` region of any device type."""

_has_function_modes: Callable[[], bool] = _find("torch._C._is_torch_function_mode_enabled", lambda: True)
_STACK = ("_get_current_{}_mode_stack", "_pop_mode", "_push_mode")
_function_modes = tuple(_find(f"torch.overrides.{name.format('function')}", None) for name in _STACK)
_dispatch_modes = tuple(_find(f"torch.utils._python_dispatch.{name.format('dispatch')}", None) for name in _STACK)
_default_device = _find("torch._GLOBAL_DEVICE_CONTEXT", None)


class Unnoticed:
    """The base of modes that change nothing, so that all is computed as without them."""


def in_function_mode() -> bool:
    """Whether a `TorchFunctionMode` that is not `Unnoticed` intercepts calls of torch's functions."""
    if not _has_function_modes():
        return False
    modes = _function_modes[0]
    return modes is None or not all(isinstance(mode, Unnoticed) for mode in modes())


def has_modes() -> bool:
    """Whether any mode intercepts this thread's calls, an `Unnoticed` one too."""
    return bool(_has_function_modes() or _number_of_dispatch_modes())


def insert_modes(*modes: Any) -> None:
    """Let modes intercept calls below all others, which a program may enter and leave meanwhile."""
    for mode in modes:
        stack = _stack_of(mode)
        if None not in stack:
            others = stack[0]()
            # torch expects that of `torch.set_default_device` at the bottom.
            default = getattr(_default_device, "device_context", mode)
            place = sum(one is default for one in others[:1])
            _replace_modes(stack, [*others[:place], mode, *others[place:]])


def remove_modes(*modes: Any) -> None:
    """End what `insert_modes` began in this thread, if anything."""
    for mode in modes:
        stack = _stack_of(mode)
        modes_now = [] if None in stack else stack[0]()
        if any(one is mode for one in modes_now):
            _replace_modes(stack, [one for one in modes_now if one is not mode])


def _stack_of(mode: Any) -> tuple[Any, ...]:
    return _function_modes if isinstance(mode, TorchFunctionMode) else _dispatch_modes


def _replace_modes(stack: tuple[Any, ...], modes: Sequence[Any]) -> None:
    current, pop, push = stack
    for _ in current():
        pop()
    for one in modes:
        push(one)


tracing_state: Callable[[], Any] = _find("torch._C._get_tracing_state", _tracing)
"""The state of a `torch.jit.trace` that runs; None where none does."""

_number_of_dispatch_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack", lambda: 1)


def dispatch_modes() -> int:
    """Return how many `TorchDispatchMode`s intercept operators, without those that are `Unnoticed`."""
    count = _number_of_dispatch_modes()
    if count and _dispatch_modes[0] is not None:
        count -= sum(isinstance(mode, Unnoticed) for mode in _dispatch_modes[0]())
    return count


DispatchMode: Any = torch.utils._python_dispatch.TorchDispatchMode
"""The base class of what intercepts operators."""

OpOverload: Any = torch._ops.OpOverload
"""The class of the operators that a `DispatchMode` intercepts."""

OpOverloadPacket: Any = torch._ops.OpOverloadPacket
"""The class of the ops of `torch.ops`, each of which has its overloads as attributes."""

schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
"""Returns the schema of an `OpOverload`: its arguments and results, and which of them it writes to."""

_without_functions = _find("torch._C.DisableTorchFunction", contextlib.nullcontext)
_without_autocast = _find("torch._C._DisableAutocast", contextlib.nullcontext)
_without_dispatch_modes = _find("torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within a ``with`` statement nothing intercepts this thread's calls: no mode, no autocast region, no graph."""
    with _without_functions(), _without_autocast(), _without_dispatch_modes(), torch.no_grad():
        yield


# A torch that is built without CUDA has none.
_cuda_stream: Callable[[int], int] | None = (
    _find("torch._C._cuda_getCurrentRawStream", None) if torch.backends.cuda.is_built() else None
)


def current_stream(tensor: Tensor) -> Any:
    """Return what tells the stream in use on a tensor's device, an accelerator, from others."""
    if _cuda_stream is not None and tensor.is_cuda:
        # A tenth of the time of the public function.
        return _cuda_stream(tensor.get_device())
    return torch.accelerator.current_stream(tensor.device)


is_transformed: Callable[[Tensor], bool] = _find("torch._C._functorch.is_functorch_wrapped_tensor", lambda _: True)
"""Whether a transform of `torch.func` wraps a tensor."""


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process; imports nothing, 0 where it does not tell."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("stats", {}).get("unique_graphs", 0))


def compiled_wrappers() -> int:
    """Return by how many backends torch.compile is to compile, whose wrappers may not have been called yet."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return sum(map(callable, backends.values()))


def compiled_model_class() -> Any:
    """Return the class of what torch.compile makes of a model, once Dynamo is imported; else None."""
    found = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return found if hasattr(found, "_initialize") else None


def renew_compiled_model(compiled: Any, replaces: Callable[[Any], bool]) -> None:
    """Let what torch.compile made of a model call that as models are called now.

    It keeps a method from the time when it was made. All models have one replacement of that method, and Dynamo keeps
    a few graphs for the code of a function: each gets a copy.

    Args:
        compiled: What torch.compile made.
        replaces: Tells of a function whether it is a replacement.
    """
    own = vars(compiled)
    made = own.get("_forward", own.get("forward"))
    called = getattr(made, "_torchdynamo_orig_callable", None)
    # The program may have wrapped it.
    if not isinstance(called, types.MethodType) or getattr(made, "__wrapped__", None) is not called:
        return
    method: Any = called
    model, function, now = method.__self__, method.__func__, type(method.__self__).__call__
    is_replaced = replaces(now)
    if (getattr(function, "_autoamp_copied", None) if is_replaced else function) is now:
        return
    function = now
    if is_replaced:
        function = types.FunctionType(now.__code__.replace(), now.__globals__, now.__name__, None, now.__closure__)
        function._autoamp_copied = now  # type: ignore[attr-defined]
    forward = compiled.dynamo_ctx(types.MethodType(function, model))
    if "_forward" in own:
        compiled._forward = forward
    else:
        compiled.forward = forward


def forget_compiled_code() -> None:
    """Let torch.compile compile anew what it has compiled so far, whose guards do not look at methods of tensors."""
    if compiled_graphs():
        getattr(sys.modules["torch._dynamo"], "reset_code_caches", lambda: None)()


def _start_no_graph() -> Callable[[Any], None]:
    eval_frame = "torch._C._dynamo.eval_frame."
    names = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
    set_strategy, strategy, action = (_find(eval_frame + name, None) for name in names)
    if None in (set_strategy, strategy, action):
        return lambda function: None

    def start_no_graph(function: Any) -> None:
        # Closures of one function share their code, to which the strategy belongs.
        function.__code__ = function.__code__.replace()
        set_strategy(function.__code__, strategy(action.SKIP, action.SKIP))

    return start_no_graph


start_no_graph: Callable[[Any], None] = _start_no_graph()
"""Keeps torch.compile from a graph that begins in a call of this function. Within a graph it is traced as others are.

Where a name is missing it does nothing."""


class OperatorMode(DispatchMode):  # type: ignore[misc]
    """A mode that leaves torch.compile alone; a subclass has ``__torch_dispatch__``."""

    supports_higher_order_operators = True

    def __init_subclass__(cls) -> None:
        """Keep torch.compile from graphs that begin within the mode."""
        super().__init_subclass__()
        start_no_graph(cls.__torch_dispatch__)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch.compile compiles as it does without a mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import Dynamo at the first operator, which takes a second. `start_no_graph` does the same.
        return False


@contextlib.contextmanager
def without_operator_modes() -> Iterator[None]:
    """Take the modes of `OperatorMode` off this thread for a ``with`` statement: they spoil a `torch.jit.trace`."""
    before = [] if None in _dispatch_modes else _dispatch_modes[0]()
    others = [mode for mode in before if not isinstance(mode, OperatorMode)]
    if len(others) == len(before):
        yield
        return
    _replace_modes(_dispatch_modes, others)
    try:
        yield
    finally:
        _replace_modes(_dispatch_modes, before)


tracing_context: Callable[[], Any] = _find("torch._guards.TracingContext.try_get", lambda: None)
"""The object that stands for one try of Dynamo to trace a function; None where it traces none.

Where it is missing, always None."""


def traced_frames() -> list[Any]:
    """Return the functions that Dynamo traces now, the innermost first, each with ``f_globals`` and ``f_code``."""
    if tracing_context() is None:
        return []
    translator = getattr(sys.modules.get("torch._dynamo.symbolic_convert"), "InstructionTranslator", None)
    frames: list[Any] = []
    with contextlib.suppress(AttributeError):
        frames.append(translator.current_tx().output.current_tx)  # type: ignore[union-attr]
        while (caller := getattr(frames[-1], "parent", None)) is not None:
            frames.append(caller)
    return frames


def name_in_frame(frame: Any, name: str) -> Any:
    """Return the value of a name in a frame, or of a closure's name in one of `traced_frames`; None without one."""
    if not hasattr(frame, "symbolic_locals"):
        return frame.f_locals.get(name)
    cell = frame.symbolic_locals.get(name)
    return None if cell is None else frame.output.side_effects.load_cell(cell).as_python_constant()


T = TypeVar("T", bound=Callable[..., Any])


def mark_constant(function: T) -> T:
    """Let Dynamo call a function while it traces, with its constant arguments, and take the result for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def disable_in_dynamo(function: T) -> T:
    """Let Dynamo end a graph before a call of this function, and begin none in it; imports nothing."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    start_no_graph(function)
    return function


def trace_instead(function: T, traced: Callable[..., Any]) -> T:
    """Let Dynamo trace ``traced`` in place of a function, and return that."""
    function._torchdynamo_inline = traced  # type: ignore[attr-defined]
    return function


def trace_as(traced: Callable[..., Any]) -> Callable[[T], T]:
    """Return a decorator that lets Dynamo trace ``traced`` in place of a function."""
    return lambda function: trace_instead(function, traced)


def _is_known_true(comparison: bool | torch.SymBool) -> bool:
    # Late, since it imports sympy. What traces has imported it.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(comparison)


@trace_as(_is_known_true)
def is_known_true(comparison: Any) -> bool:
    """Whether a comparison of sizes holds; of those that a trace leaves open, whatever they are. It adds no guard.

    Args:
        comparison: A bool, a `torch.SymBool`, or what `torch.jit.trace` makes of it, a tensor.
    """
    return _is_known_true(comparison) if isinstance(comparison, torch.SymBool) else bool(comparison)


REGION_OF_GRAPH: Any = _find("torch.amp.autocast_mode._UnmanagedAutocast", ())
"""The class of the autocast regions that a graph enters as it runs; () where there is none."""


STRICT_EXPORT = "_strict_export"
"""The name in `torch.export._trace` of what exports by Dynamo. Without it that export may cast ops twice."""


def dynamo_names() -> Sequence[tuple[Any, str]]:
    """Return what is patched of Dynamo, once it is imported, as owners and names; nothing where one of them is missing.

    They find the attribute of a tensor, call an operator, run a node with fake tensors, call the backend, and enter a
    region of torch.autocast. Without them a graph calls methods and operators by their names, and casts when it runs.
    """
    modules = sys.modules.get
    tensor = getattr(modules("torch._dynamo.variables.tensor"), "TensorVariable", None)
    owners = (
        # The first is its name from torch 2.14 on.
        (tensor, "tp_getattro_impl" if hasattr(tensor, "tp_getattro_impl") else "var_getattr"),
        (getattr(modules("torch._dynamo.variables.builtin"), "BuiltinVariable", None), "call_function"),
        (modules("torch._dynamo.utils"), "run_node"),
        (getattr(modules("torch._dynamo.output_graph"), "OutputGraph", None), "call_user_compiler"),
        (getattr(modules("torch._dynamo.variables.ctx_manager"), "AutocastModeVariable", None), "enter"),
    )
    return owners if all(hasattr(owner, name) for owner, name in owners) else ()


def method_in_dynamo(tx: Any, name: str) -> Any:
    """Return Dynamo's variable of a method of `Tensor`, with guards on what the method is now."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker

    source = AttrSource(AttrSource(tx.import_source("torch"), "Tensor"), name)
    return VariableTracker.build(tx, inspect.getattr_static(Tensor, name), source)


def loss_of_class() -> tuple[Any, str]:
    """Return the owner and the name of what Dynamo calls for `torch.nn.CrossEntropyLoss(...)`; None where it has none.

    Dynamo of torch 2.13 makes no such module, but a node that calls torch's function when the graph runs.
    """
    owner = getattr(sys.modules.get("torch._dynamo.variables.user_defined"), "UserDefinedClassVariable", None)
    name = "_call_cross_entropy_loss"
    return owner if hasattr(owner, name) else None, name


def loss_in_dynamo(tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return Dynamo's variable of `torch.nn.functional.cross_entropy`, as it is now, with what its module was given.

    Args:
        tx: What traces.
        args: Variables of the positional arguments of the module.
        kwargs: Variables of those that are given by name.
    """
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import LambdaVariable
    from torch._dynamo.variables.base import VariableTracker

    names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    source = AttrSource(tx.import_source("torch.nn.functional"), "cross_entropy")
    function = VariableTracker.build(tx, torch.nn.functional.cross_entropy, source)
    return LambdaVariable(lambda *loss, **named: function.call_function(tx, [*loss], {**given, **named}))


def partial_in_dynamo(function: Any, *args: Any) -> Any:
    """Return Dynamo's variable of a function with its first arguments."""
    from torch._dynamo.variables.functions import FunctoolsPartialVariable

    return FunctoolsPartialVariable(function, [*args], {})


def attribute_in_dynamo(owner: Any, name: str) -> Any:
    """Return Dynamo's variable of an attribute that torch itself is to find, such as a method of a tensor."""
    from torch._dynamo.variables import GetAttrVariable

    return GetAttrVariable(owner, name)


def disabled_by_dynamo(function: Any) -> Any:
    """Return the function that `torch.compiler.disable` has wrapped in another one; None for any other."""
    is_disabled = getattr(function, "_torchdynamo_disable", False)
    return getattr(function, "_torchdynamo_orig_callable", None) if is_disabled else None


def traced_in_place_of(function: Any) -> Any:
    """Return what Dynamo traces in place of a function, by `trace_as`; None for a function that it traces itself."""
    return inspect.getattr_static(function, "_torchdynamo_inline", None)


compiler_callback: Callable[[], Any] = _find("torch._C._dynamo.eval_frame.get_eval_frame_callback", lambda: None)
"""What compiles the functions that are called now, in a call of what torch.compile returned; None or False for nothing.

Where it is missing, always None."""

current_graph_task: Callable[[], int] = _find("torch._C._current_graph_task_id", lambda: -1)
"""The number of the backward pass that runs in this thread, -1 for none. Where it is missing, always -1."""

TELLS_GRAPH_TASKS = "torch._C._current_graph_task_id" not in MISSING
"""Whether `current_graph_task` is torch's own, so that -1 means that no pass runs."""

current_node: Callable[[], Any] = _find("torch._C._current_autograd_node", lambda: None)
"""The node of the graph whose backward runs in this thread; None for none."""

number_of_nodes: Callable[[], int] = _find("torch._C._autograd._get_sequence_nr", lambda: -1)
"""The number that the next node of the graph will have that this thread makes."""

number_of_node: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""Returns the number of a node. Numbers count up in each thread."""


def dtype_of_node(node: Any) -> torch.dtype | None:
    """Return the dtype of what an operator gave whose node of the graph this is; None where torch does not tell."""
    found = getattr(node, "_input_metadata", None)
    return found[0].dtype if found else None


mkldnn_enabled: Callable[[], bool] = _find("torch._C._get_mkldnn_enabled", lambda: False)
"""Whether the user lets torch call oneDNN."""


_tells_dual_level = _find("torch.autograd.forward_ad._current_level", None) is not None


def is_intercepted() -> bool:
    """Whether torch's own op has to be called in this thread, for somebody intercepts it.

    That is a region of torch.autocast, a mode, `torch.jit.trace` or forward-mode derivatives.
    """
    return bool(
        is_any_autocast_enabled()
        or in_function_mode()
        or dispatch_modes()
        or not _tells_dual_level
        or forward_ad._current_level >= 0
        or tracing_state() is not None
    )


# -- operators of ATen --


unscale_and_check_: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiplies tensors of one device by ``inv_scale`` in place; 1.0 in ``found_inf`` tells of inf and nan among them."""

update_scale_: Callable[[Tensor, Tensor, Tensor, float, float, int], object] = torch._amp_update_scale_
"""Updates a dynamic loss scale, and its count of steps without overflow, after a step: in place, on their device."""

normed_weight: Callable[[Tensor, Tensor, int], Tensor] = torch._weight_norm
"""``v`` scaled to the norms ``g``, which are over all dimensions but ``dim``; with -1 over all."""

fused_adam_: Callable[..., None] = torch._fused_adam_
fused_adamw_: Callable[..., None] = torch._fused_adamw_
fused_sgd_: Callable[..., None] = torch._fused_sgd_
"""These three step by one kernel, as torch's own fused optimizers do."""

flatten_recurrent_weights: Callable[..., Tensor] = torch._cudnn_rnn_flatten_weight
"""Moves the weights of a recurrent layer into a flat tensor, in cuDNN's layout, and returns that tensor."""


# -- backward passes --

_will_execute = _find("torch._C._will_engine_execute_node", None)


def engine_reaches(leaf: Tensor) -> bool:
    """Whether the backward pass that calls is going to add to the ``.grad`` of a leaf; False where torch cannot tell.

    `torch.autograd.grad` adds to none.
    """
    if _will_execute is None or not leaf.requires_grad:
        return False
    try:
        return bool(_will_execute(torch.autograd.graph.get_gradient_edge(leaf).node))
    except (RuntimeError, ValueError):
        # It tells of no leaf whose gradient `torch.autograd.grad` returns. A lazy parameter is in no graph.
        return False


_engine = _find("torch.autograd.Variable._execution_engine", None)


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that calls this; never where torch cannot."""
    if _engine is not None:
        _engine.queue_callback(callback)


# -- parameters of several ranks --


def has_step_pre_hooks(optimizer: Any) -> bool:
    """Whether hooks run before the steps of an optimizer, those of all optimizers apart."""
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", None))


def is_parallelized(module: Any) -> bool:
    """Whether `parallelize_module` has distributed a module; False where the installed torch does not mark it."""
    return bool(getattr(module, "_distribute_module_applied", False))


def is_replica(module: Any) -> bool:
    """Whether a module was made by `torch.nn.parallel.replicate`: its parameters are plain tensors."""
    return bool(getattr(module, "_is_replica", False))


# -- what is patched beside the functions of the lists. Where it is None there is no patch --


def _recomputation() -> str | None:
    older = "_checkpoint_without_reentrant_generator"
    # In torch 2.14 the older one calls this.
    newer = f"{older}_impl"
    name = newer if hasattr(torch.utils.checkpoint, newer) else older
    return name if _find(f"torch.utils.checkpoint.{name}", None) is not None else None


STATE_MADE = "_init_optim_state"
"""The name in `torch.distributed.checkpoint.state_dict`, which is imported late, of what takes a step with gradients of
0 to make an optimizer's state. Without it that counts as a step, and torch ends in a KeyError for masters."""

RECURRENT: Any = _find("torch._VF", None)
"""The namespace of the functions that recurrent layers call."""

RECOMPUTATION: str | None = _recomputation()
"""The name in `torch.utils.checkpoint` of what takes the function that a checkpoint calls a second time. Without it the
second call is cast as the thread's switches are by then."""


CUSTOM_FUNCTION_CONTEXT: Any = _find("torch.autograd.function.BackwardCFunction", None)
"""The base class of the ``ctx`` of custom functions. Without it a backward casts as its thread does then."""


def function_of_node(node: Any) -> Any:
    """Return the `torch.autograd.Function` of the program that made a node of the graph; None for another node."""
    return getattr(type(node), "_forward_cls", None)


_builtins = _both("torch.jit._builtins._find_builtin", "torch.jit._builtins._get_builtin_table")

names_of_builtins: tuple[Callable[[Any], Any], Callable[[], dict[int, Any]]] = (
    ((lambda _: None), dict) if None in _builtins else _builtins
)
"""TorchScript's look-up of the operator of a builtin, and its table. Without them it compiles no op that is listed."""

SCRIPTED: tuple[Any, ...] = tuple(
    kind for kind in (_find(f"torch._C.{name}", None) for name in ("ScriptMethod", "ScriptFunction")) if kind
)
"""The classes of compiled methods and functions of TorchScript. One that is missing calls its code without casts."""

two_in_one: Any = _find("torch._jit_internal.boolean_dispatched", {})
"""TorchScript's table of the functions that call one of two others by a flag."""


# -- classes --

MODULES_OF_BATCH_NORM: Any = torch.nn.modules.batchnorm._BatchNorm
"""The base class of batch norms."""

MODULES_OF_NORMS: Any = torch.nn.modules.batchnorm._NormBase
"""The base class of norms that may have running statistics."""


# -- oneDNN's own layouts --


class _Mkldnn:
    """The operators that pack weights for oneDNN, and those that take packed weights: of each pair both, or None twice.

    Attributes:
        reorder_linear, linear: Packs a linear layer's weight; runs the layer.
        reorder_lstm, lstm: The same for one layer and direction of an LSTM.
        has_bf16: Tells whether this CPU has units for bf16.
    """

    def __init__(self) -> None:
        ops = "torch.ops.mkldnn."
        self.reorder_linear, self.linear = _both(
            f"{ops}_reorder_linear_weight.default", f"{ops}_linear_pointwise.default"
        )
        self.reorder_lstm, self.lstm = _both(f"{ops}_reorder_mkldnn_rnn_layer_weight.default", "torch.mkldnn_rnn_layer")
        self.has_bf16: Callable[[], bool] = _find("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)
        self.has_fp16: Callable[[], bool] = _find("torch.ops.mkldnn._is_mkldnn_fp16_supported", lambda: False)


mkldnn = _Mkldnn()
"""The operators for weights that are packed for oneDNN, and the half dtypes that it takes on this CPU."""
