"""TorchScript: compiled code calls ops below the functions that are replaced, so torch's own autocast casts in it.

A graph whose casts are decided runs as it is: one that was traced in this process, or that casts to half itself, as a
trace does that was saved and loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoamp.casting import Casts
from autoamp.ops.composites import run_in_autocast
from autoamp.patching import imitate
from autoamp.torch_private import SCRIPTED

__all__ = ["builders_for_scripts"]

# The numbers of fp16 and bf16 in TorchScript.
_HALF_NUMBERS = (5, 15)


def builders_for_scripts(casts: Casts) -> Sequence[tuple[Any, str, Any]]:
    """Return what is patched for TorchScript: owner, name, and what builds a replacement."""
    # By id; the graphs are kept alive so that ids are not reused.
    known: dict[int, tuple[Any, bool]] = {}

    def build(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not casts.wants(args, kwargs) or casts.autocast_rules():
                return original(self, *args, **kwargs)
            graph = self.graph
            if id(graph) not in known:
                known[id(graph)] = graph, _is_decided(self)
            if known[id(graph)][1]:
                return original(self, *args, **kwargs)
            return run_in_autocast(casts, original, (self, *args), kwargs)

        return imitate(call, original, "torch", "ScriptMethod.__call__")

    return [(owner, "__call__", build) for owner in SCRIPTED]


def _is_decided(code: Any) -> bool:
    """Tell whether the casts in a compiled method or function are decided already."""
    graph = code.inlined_graph
    # The tracer alone knows the dtypes of values.
    # Frozen weights are constants, whose dtypes are known too.
    nodes = (node for node in graph.nodes() if node.kind() != "prim::Constant")
    if any(value.isCompleteTensor() for node in nodes for value in node.outputs()):
        return True
    dtypes = [node.inputsAt(1).toIValue() for node in graph.findAllNodes("aten::to")]
    return any(dtype in _HALF_NUMBERS for dtype in dtypes if type(dtype) is int)
