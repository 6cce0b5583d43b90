"""What runs under torch's own autocast, for one call: composite functions, and TorchScript.

CUDA's autocast casts within some functions, later and less than a cast of their arguments would. And compiled code of
TorchScript calls ops below the functions that are replaced. A graph whose casts are decided runs as it is: one that was
traced in this process, or that casts the second operand of a product to half itself, such as a weight. A trace does
that, also one that was saved and loaded.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.core.casts import CastState
from autoamp.tensors import HALF_DTYPES, PLAIN_TYPES
from autoamp.torch_private import in_function_mode, is_any_autocast_enabled, tracing_state

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
