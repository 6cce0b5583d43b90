"""Models drawn at random, with precisions and disabled regions: each op has one dtype, on every path that runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autoamp

HALF = torch.bfloat16
# Each model is compiled three times and exported twice, which takes seconds. So does each try to shrink a failure.
FEW = settings(max_examples=settings.default.max_examples // 10, phases=[Phase.explicit, Phase.reuse, Phase.generate])

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "function": lambda t, w: torch.matmul(t, w),
    "operator": lambda t, w: t @ w,
    "reflected": lambda t, w: 2**t,
    "reflected division": lambda t, w: 2 / (t + 2),
    "method": lambda t, w: t.mm(w),
    "by name": lambda t, w: t.matmul(other=w),
    "of torch": lambda t, w: F.linear(t, w),
    "in fp32": lambda t, w: t.cumsum(0),
    "in place": lambda t, w: t.clone().addmm_(t, w),
    "composite": lambda t, w: F.normalize(t),
    "loss": lambda t, w: t * F.mse_loss(t, w),
}


class Block(nn.Module):
    """Ops and blocks in a row, in one of the ways that a model has to set the precision of what it calls."""

    def __init__(self, kind: str, items: list[Any]) -> None:
        super().__init__()
        self.kind = kind
        self.names = [item if isinstance(item, str) else None for item in items]
        self.blocks = nn.ModuleList(Block(*item) for item in items if not isinstance(item, str))

    def items(self, t: Tensor, w: Tensor, outputs: list[Tensor]) -> Tensor:
        blocks = iter(self.blocks)
        for name in self.names:
            if name is None:
                t, inner = next(blocks)(t, w)
                outputs += inner
            else:
                # In range and in fp32: where casts are off torch refuses two dtypes.
                t = OPS[name](torch.tanh(t.float()), w.float())
                outputs.append(t)
        return t

    def run(self, t: Tensor, w: Tensor) -> tuple[Tensor, list[Tensor]]:
        outputs: list[Tensor] = []
        return self.items(t, w, outputs), outputs

    def forward(self, t: Tensor, w: Tensor) -> tuple[Tensor, list[Tensor]]:
        if self.kind == "checkpoint":
            return checkpoint(self.run, t, w, use_reentrant=False)
        if self.kind in ("disabled", "enabled"):
            with torch.autocast("cpu", dtype=HALF, enabled=self.kind == "enabled"):
                return self.run(t, w)
        return self.run(t, w)


KINDS = st.sampled_from(["plain", "fp32", "fp16", "disabled", "enabled", "checkpoint"])
ITEMS: Any = st.lists(st.sampled_from(list(OPS)), min_size=1, max_size=3)
for _ in range(3):
    ITEMS = st.lists(st.sampled_from(list(OPS)) | st.tuples(KINDS, ITEMS), min_size=1, max_size=3)


class Dtypes(TorchDispatchMode):
    """Notes the ops that run, with the dtypes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen.append((func.overloadpacket.__name__, result.dtype))
        return result


def computed(seen: list[tuple[str, torch.dtype]]) -> list[tuple[str, torch.dtype]]:
    """What computes among ops that were seen: casts may be shared, and copies and views differ from path to path."""
    names = ("mm", "addmm", "cumsum", "pow", "reciprocal", "mse_loss", "linalg_vector_norm")
    return [(name.rstrip("_"), dtype) for name, dtype in seen if name.rstrip("_") in names]


@FEW
@given(items=ITEMS, scope=st.sampled_from(["global", "modules"]))
def test_each_op_has_one_dtype_on_every_path(items: list[Any], scope: Any) -> None:
    torch.manual_seed(0)
    model, t, w = Block("plain", items), torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    handle = autoamp.init(scope=scope, device_type="cpu", dtype=HALF)
    try:
        for module in model.modules():
            if isinstance(module, Block) and module.kind in ("fp32", "fp16"):
                handle.override(module, module.kind)
        # By scope casts may end with the first enabled region of the program.
        model(t, w)
        with Dtypes() as eager:
            expected = model(t, w)[1]
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            return torch._dynamo.backends.common.aot_autograd(fw_compiler=kept)(graph, inputs)

        def kept(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph

        dynamo.reset()
        with torch.no_grad():
            torch.compile(model, backend=backend, fullgraph=True)(t, w)
            nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
            compiled = [(node.target.overloadpacket.__name__, node.meta["val"].dtype) for node in nodes]
            with Dtypes() as plain:
                model(t, w)
        assert computed(compiled) == computed(plain.seen)
        paths = {one: torch.compile(model, backend=one, fullgraph=True) for one in ("eager", "aot_eager")}
        if not {"checkpoint", "enabled"} & {module.kind for module in model.modules() if isinstance(module, Block)}:
            # Without autoamp too, torch fails to export checkpoints by Dynamo. Of a cast within an enabled region it
            # exports an assertion of another dtype, which fails.
            paths["strict export"] = torch.export.export(model, (t, w), strict=True).module()
        paths["export"] = torch.export.export(model, (t, w), strict=False).module()
        for path, run in paths.items():
            dynamo.reset()
            with Dtypes() if path == "export" else contextlib.nullcontext() as exported:
                found = run(t, w)[1]
            assert [output.dtype for output in found] == [output.dtype for output in expected], path
            if "export" not in path:
                assert all(map(torch.equal, found, expected)), path
            if isinstance(exported, Dtypes):
                assert computed(exported.seen) == computed(eager.seen)
    finally:
        handle.deactivate()
