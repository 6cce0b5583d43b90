"""Every private name of torch that autoamp uses: asked for here, once, each with a way to do without it.

A release of torch may rename or drop what begins with an underscore. No other file of the package uses such a name, so
this one tells what may break, and `MISSING` what the installed torch lacks. What is left out of it: the multi-tensor
functions ``torch._foreach_*``, of which torch's own optimizers are made, and ``Tensor._version``.

Functions stand here as torch's own objects where they are there, since compilers know those by identity.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = [
    "ASKED",
    "CHECK_INPUT",
    "CUSTOM_FUNCTION_CONTEXT",
    "MISSING",
    "MODULES_OF_BATCH_NORM",
    "MODULES_OF_NORMS",
    "MODULE_CALL",
    "RECOMPUTATION",
    "RECURRENT",
    "TELLS_GRAPH_TASKS",
    "TENSOR_GUARDS",
    "cudnn_enabled",
    "current_graph_task",
    "dispatch_modes",
    "flatten",
    "flatten_recurrent_weights",
    "group_by_device_and_dtype",
    "in_dual_level",
    "in_function_mode",
    "is_any_autocast_enabled",
    "is_transformed",
    "mkldnn",
    "mkldnn_enabled",
    "names_of_builtins",
    "negated_view",
    "normed_weight",
    "tracing_state",
    "two_in_one",
    "unflatten",
    "unscale_and_check_",
    "update_scale_",
]

ASKED: list[str] = []
"""All of these names, in the order in which they were asked for."""

MISSING: list[str] = []
"""Those among them that the installed torch lacks."""


def _find(path: str, otherwise: Any) -> Any:
    """Return what a dotted path leads to, through modules that are imported on the way; else what is to serve."""
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
    """Return two things of which neither serves alone, or None twice."""
    found = _find(one, None), _find(other, None)
    return (None, None) if None in found else found


# -- what holds in a thread. Without them the careful answer is given, which sends a call the long way --


def _any_autocast() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda", "mps", "xpu")))


def _tracing() -> bool | None:
    jit: Any = torch.jit
    return jit.is_tracing() or None


is_any_autocast_enabled: Callable[[], bool] = _find("torch._C._is_any_autocast_enabled", _any_autocast)
"""Whether a ``torch.autocast`` region of any device type holds in this thread."""

in_function_mode: Callable[[], bool] = _find("torch._C._is_torch_function_mode_enabled", lambda: True)
"""Whether a mode looks at calls of torch's functions."""

tracing_state: Callable[[], Any] = _find("torch._C._get_tracing_state", _tracing)
"""What `torch.jit.trace` keeps while it runs, else None."""

dispatch_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack", lambda: 1)
"""How many modes look at operators."""

is_transformed: Callable[[Tensor], bool] = _find("torch._C._functorch.is_functorch_wrapped_tensor", lambda _: True)
"""Whether a transform of `torch.func` wraps a tensor."""

current_graph_task: Callable[[], int] = _find("torch._C._current_graph_task_id", lambda: -1)
"""The number of the backward pass that runs in this thread, -1 for none. Without it no pass is ever seen within one."""

TELLS_GRAPH_TASKS = "torch._C._current_graph_task_id" not in MISSING
"""Whether `current_graph_task` knows."""

mkldnn_enabled: Callable[[], bool] = _find("torch._C._get_mkldnn_enabled", lambda: False)
"""Whether the user lets torch call oneDNN."""

cudnn_enabled: Callable[[], bool] = _find("torch._C._get_cudnn_enabled", lambda: torch.backends.cudnn.enabled)
"""Whether the user lets torch call cuDNN."""


def _dual_level() -> Callable[[], bool]:
    if _find("torch.autograd.forward_ad._current_level", None) is None:
        return lambda: True
    return lambda: forward_ad._current_level >= 0


in_dual_level: Callable[[], bool] = _dual_level()
"""Whether forward-mode derivatives are being computed."""


# -- gradients --


def _grouped(tensorlistlist: Any, with_indices: bool) -> dict[Any, Any]:
    groups: dict[Any, Any] = {}
    for tensor in tensorlistlist[0]:
        groups.setdefault((tensor.device, tensor.dtype), ([[]], []))[0][0].append(tensor)
    return groups


group_by_device_and_dtype: Callable[[Any, bool], dict[Any, Any]] = _find(
    "torch._C._group_tensors_by_device_and_dtype", _grouped
)
"""Takes ``[tensors], False``; returns ``([tensors], [])`` by device and dtype."""


def _unscale_and_check(values: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    for value in values:
        found_inf.copy_(torch.maximum(found_inf, (~value.isfinite()).any().to(found_inf)))
        value.mul_(inv_scale.to(value.device))


unscale_and_check_: Callable[[Sequence[Tensor], Tensor, Tensor], None] = _find(
    "torch._amp_foreach_non_finite_check_and_unscale_", _unscale_and_check
)
"""Multiplies tensors of one device by ``inv_scale`` in place; 1.0 in ``found_inf`` tells of inf and nan among them."""


def _update_scale(
    scale: Tensor, tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> None:
    bad, grows = found_inf.view(()) != 0.0, tracker + 1 == interval
    factor = torch.where(bad, backoff, torch.where(grows, growth, torch.ones_like(scale, dtype=torch.float64)))
    scale.copy_(scale.double() * factor)
    tracker.copy_(torch.where(bad | grows, 0, tracker + 1))


update_scale_: Callable[[Tensor, Tensor, Tensor, float, float, int], None] = _find(
    "torch._amp_update_scale_", _update_scale
)
"""Moves a dynamic loss scale, and its count of clean steps, by one step, in place and on their device."""


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))


flatten: Callable[[Sequence[Tensor]], Tensor] = _find("torch._utils._flatten_dense_tensors", _flatten)
"""One tensor of one dimension out of many of one dtype."""

unflatten: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]] = _find(
    "torch._utils._unflatten_dense_tensors", _unflatten
)
"""The parts of such a tensor, in the shapes of the tensors that are given."""


def _normed_weight(v: Tensor, g: Tensor, dim: int) -> Tensor:
    others = None if dim == -1 else [axis for axis in range(v.dim()) if axis != dim]
    norms: Tensor = torch.linalg.vector_norm(v, dim=others, keepdim=dim != -1)
    return v * (g / norms)


normed_weight: Callable[[Tensor, Tensor, int], Tensor] = _find("torch._weight_norm", _normed_weight)
"""``v`` at the norms ``g``, over all dimensions but ``dim``; -1 for one norm of all of it."""

TENSOR_GUARDS: Any = _find("torch._C._dynamo.guards.TensorGuards", None)
"""The check that torch's compiler makes of its arguments. Without it gradients are looked at one by one."""

negated_view: Callable[[Tensor], Tensor] = _find("torch._neg_view", torch.neg)
"""A view with the lazy negation that some complex operations leave. It serves to try `TENSOR_GUARDS` out."""


# -- what is patched beside the functions of the lists; None is not patched --


def _recomputation() -> str | None:
    older = "_checkpoint_without_reentrant_generator"
    # In torch 2.14 the older one hands over to this.
    newer = f"{older}_impl"
    name = newer if hasattr(torch.utils.checkpoint, newer) else older
    return name if _find(f"torch.utils.checkpoint.{name}", None) is not None else None


RECURRENT: Any = _find("torch._VF", None)
"""The namespace of the functions that recurrent layers call."""

flatten_recurrent_weights: Callable[..., Tensor] | None = _find("torch._cudnn_rnn_flatten_weight", None)
"""Lays the weights of a recurrent layer out as cuDNN takes them, and returns the flat tensor that they are views of."""

CHECK_INPUT: str | None = "check_input" if _find("torch.nn.RNNBase.check_input", None) is not None else None
"""The method by which a recurrent layer refuses an input of another dtype than its weights'."""

RECOMPUTATION: str | None = _recomputation()
"""The name in `torch.utils.checkpoint` of what gets the function that a checkpoint calls again. Without it the function
runs again as the thread casts by then."""

CUSTOM_FUNCTION_CONTEXT: Any = _find("torch.autograd.function.BackwardCFunction", None)
"""The base of what a custom function gets as ``ctx``. Without it its backward casts as its thread does then."""

MODULE_CALL: Any = _find("torch.nn.Module._call_impl", None)
"""What ``Module.__call__`` chooses. Without it every module is called through torch's own way."""


def _names_of_builtins() -> tuple[Callable[[Any], Any], Callable[[], dict[int, Any]]]:
    find, table = _both("torch.jit._builtins._find_builtin", "torch.jit._builtins._get_builtin_table")
    return (find, table) if find is not None else ((lambda _: None), dict)


names_of_builtins: tuple[Callable[[Any], Any], Callable[[], dict[int, Any]]] = _names_of_builtins()
"""How TorchScript finds the operator of a builtin, and the table it looks in. Without them it compiles no listed op."""

two_in_one: Any = _find("torch._jit_internal.boolean_dispatched", {})
"""What TorchScript knows of functions that choose another by a flag."""


# -- classes --

MODULES_OF_BATCH_NORM: Any = _find(
    "torch.nn.modules.batchnorm._BatchNorm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
)
"""Batch norms, for ``isinstance``."""

MODULES_OF_NORMS: Any = _find(
    "torch.nn.modules.batchnorm._NormBase",
    (
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    ),
)
"""Norms that may keep running statistics, for ``isinstance``."""


# -- oneDNN's own layouts --


class _Mkldnn:
    """The operators of `torch.ops.mkldnn` with which weights are packed; None for both of a kind where one is missing.

    Attributes:
        reorder_linear, linear: Packs a linear layer's weight; runs the layer.
        reorder_conv, conv: The same for a convolution.
        reorder_lstm: Packs the weights of one layer and direction of an LSTM.
        lstm: Runs it.
        has_bf16: Tells whether this CPU has units for bf16.
    """

    def __init__(self) -> None:
        ops = "torch.ops.mkldnn."
        self.reorder_linear, self.linear = _both(
            f"{ops}_reorder_linear_weight.default", f"{ops}_linear_pointwise.default"
        )
        self.reorder_conv, self.conv = _both(
            f"{ops}_reorder_convolution_weight.default", f"{ops}_convolution_pointwise.default"
        )
        self.reorder_lstm, self.lstm = _both(f"{ops}_reorder_mkldnn_rnn_layer_weight.default", "torch.mkldnn_rnn_layer")
        self.has_bf16: Callable[[], bool] = _find("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)


mkldnn = _Mkldnn()
"""The operators with which weights are packed."""
