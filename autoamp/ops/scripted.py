"""TorchScript: compiled code calls ops below the functions that are replaced, so torch's own autocast casts in it.

A graph whose casts are decided runs as it is: one that was traced in this process, or that casts the second operand of
a product to half itself, such as a weight. A trace does that, also one that was saved and loaded.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

from autoamp.casting import CastState
from autoamp.ops.composites import run_in_autocast
from autoamp.patching import imitate

# The numbers of fp16 and bf16 in TorchScript.
_HALF_NUMBERS = (5, 15)
_PRODUCT = re.compile("aten::(_?conv|linear|matmul|bilinear|(add|badd|b|addb)?mm$|(add)?mv$)|prim::ListConstruct")


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

    return imitate(call, original, "torch", "ScriptMethod.__call__")


def _is_decided(code: Any) -> bool:
    """Whether the casts in a compiled method or function are decided already."""
    graph = code.inlined_graph
    # The tracer alone knows the dtypes of values.
    # Frozen weights are constants, whose dtypes are known too.
    nodes = (node for node in graph.nodes() if node.kind() != "prim::Constant")
    if any(value.isCompleteTensor() for node in nodes for value in node.outputs()):
        return True
    casts = (node for node in graph.findAllNodes("aten::to") if _is_half(node.inputsAt(1).toIValue()))
    uses = (use for node in casts for use in node.output().uses())
    return any(use.offset > 0 and _PRODUCT.match(use.user.kind()) for use in uses)


def _is_half(dtype: Any) -> bool:
    return type(dtype) is int and dtype in _HALF_NUMBERS
