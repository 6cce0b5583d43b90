"""torch.compile, torch.jit, torch.fx, torch.export and ONNX: what they make of a model holds the casts."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autoamp
from tests.launches import plainly, written

# What torch says of its older compilers, and of recurrent layers that are traced.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        ".torch.jit",
        ".*ONNX",
        "The feature will be removed",
        "Converting a tensor",
        "While compiling",
        "The tensor attr",
        "TF32",
        "Dynamo does not know",
    )
]


class ConvNet(nn.Module):
    """Convolutions, batch norm, an op of the fp32 list and one of no list."""

    shape = (2, 3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.second(torch.sigmoid(self.norm(self.first(x)))))
        return F.log_softmax(self.last(hidden.mean((2, 3))), -1)


class Recurrent(nn.Module):
    """Two layers of LSTM."""

    shape = (2, 4, 6)

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(6, 8, 2, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    """Two encoder layers, and an einsum."""

    shape = (2, 4, 16)

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(16, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bld,ed->ble", self.encoder(x), self.last.weight).mean(1)


MODELS = [ConvNet, Recurrent, Transformer]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Dynamo takes LSTMs where it is told to; torch's compiled oneDNN layer for them breaks without us too."""
    dynamo.reset()
    with dynamo.config.patch(allow_rnn=True), torch.backends.mkldnn.flags(enabled=False):  # type: ignore[attr-defined]
        yield
    dynamo.reset()


class Graphs:
    """A backend of torch.compile that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    def dtypes(self, of: Callable[[fx.Node], bool]) -> set[torch.dtype]:
        """The dtypes of the tensors that some nodes make."""
        nodes = [node for graph in self.graphs for node in graph.graph.nodes if node.op.startswith("call_")]
        values = [node.meta["example_value"] for node in nodes if of(node)]
        return {value.dtype for value in values if isinstance(value, Tensor)}


def trained(handle: autoamp.Handle, model: nn.Module, function: Any, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """One step's output and gradients."""
    model.zero_grad()
    output = function(x)
    with handle.scale_loss(output.float().square().mean(), []) as scaled_loss:
        scaled_loss.backward()
    return output.detach(), [parameter.grad for parameter in model.parameters()]


def assert_same(one: tuple[Tensor, list[Tensor | None]], other: tuple[Tensor, list[Tensor | None]]) -> None:
    for ours, theirs in zip([one[0], *one[1]], [other[0], *other[1]], strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


# -- torch.compile --


@pytest.mark.parametrize("cls", MODELS)
def test_compiled_training_is_eager_training_and_the_graph_holds_the_casts(cls: Any, half: torch.dtype) -> None:
    model, x, graphs = cls(), torch.randn(cls.shape), Graphs()
    handle = autoamp.init(device_type="cpu", dtype=half)
    expected = trained(handle, model, model, x)
    dynamo.utils.counters.clear()
    for backend in ("aot_eager", graphs):
        assert_same(trained(handle, model, torch.compile(model, backend=backend, fullgraph=True), x), expected)
    assert len(graphs.graphs) == 1
    assert not dynamo.utils.counters["graph_break"]
    heavy = ("linear", "conv2d", "lstm", "einsum")
    assert graphs.dtypes(lambda node: any(name in str(node.target) for name in heavy)) == {half}
    assert graphs.dtypes(lambda node: "softmax" in str(node.target)) <= {torch.float32}


def test_ops_that_torch_does_not_compile_are_not_compiled_by_themselves() -> None:
    """Dynamo skips recurrent layers by default. Inductor cannot train `torch.lstm`, if it gets that op alone."""
    layer, x, graphs = nn.LSTM(6, 8, 2), torch.randn(4, 2, 6), Graphs()

    def function(x: Tensor) -> Tensor:
        return layer(torch.sin(x))[0].square()

    with dynamo.config.patch(allow_rnn=False):  # type: ignore[attr-defined]
        torch.compile(function, backend=graphs)(x)
        before = len(graphs.graphs)
        handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
        dynamo.reset()
        compiled = trained(handle, layer, torch.compile(function, backend=graphs), x)
    assert len(graphs.graphs) == 2 * before
    assert_same(compiled, trained(handle, layer, function, x))


def test_blocks_in_compiled_functions_leave_later_losses_to_auto_scale() -> None:
    """A loss within a block is not scaled again, and one after compiled blocks is."""
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, lists={"extends": []})
    param = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=0.25)

    @torch.compile(backend="eager")
    def step() -> None:
        with handle.scale_loss((param * 0.5).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    for _ in range(4):
        step()
    handle.auto_scale()
    # The gradient leaves the range of fp32 when it is multiplied by the loss scale, and only then.
    (param * 2.0**125).sum().backward()
    optimizer.step()
    assert handle.last_step_skipped


class Classifier(nn.Module):
    """Returns its loss: functions of Python on the fp32 list run in its call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.last(self.norm(self.first(x)))
        return logits, F.cross_entropy(logits, y)


def distill(logits: Tensor, y: Tensor) -> Tensor:
    """A loss that is computed outside of modules, of functions of Python and an op."""
    return F.cross_entropy(logits, y) + F.layer_norm(logits @ logits.t(), (len(y),)).sigmoid().sum()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scope", ["modules", "global"])
@pytest.mark.parametrize(("backend", "fullgraph"), [("eager", True), ("aot_eager", False)])
@pytest.mark.parametrize("model_first", [False, True])
def test_several_compiled_functions_with_functions_of_the_fp32_list(
    dtype: torch.dtype, scope: Any, backend: str, fullgraph: bool, model_first: bool
) -> None:
    """Each function of Python on the fp32 list turns casts off within, and puts back what was there."""
    model, x, y, logits = Classifier(), torch.randn(8, 6), torch.arange(8) % 4, torch.randn(8, 4)
    autoamp.init(scope=scope, device_type="cpu", dtype=dtype)

    def run(model: Any, distill: Any) -> Iterator[Tensor]:
        for kind in [dtype, torch.float32] * 2:
            if model_first:
                yield from model(x, y)
            yield distill(logits.to(kind), y)
            yield from model(x, y)
            with torch.no_grad():
                yield from model(x, y)
            yield model(x, y)[0] @ logits.t()

    expected = list(run(model, distill))
    compiled = [torch.compile(one, backend=backend, fullgraph=fullgraph) for one in (model, distill)]

    def check() -> None:
        for ours, theirs in zip(run(*compiled), expected, strict=True):
            assert ours.dtype is theirs.dtype
            assert torch.equal(ours, theirs)

    check()
    # Another thread runs the code that this one compiled.
    with ThreadPoolExecutor(1) as pool, torch.compiler.set_stance("fail_on_recompile"):
        pool.submit(check).result()
    check()


@pytest.mark.parametrize("scope", ["modules", "global"])
@pytest.mark.parametrize("during", ["compilation", "run"])
def test_a_thread_turns_casts_off_while_another_is_in_compiled_code(scope: Any, during: str) -> None:
    """Neither the guards nor the writes of compiled code concern the switches of other threads."""
    model, x, y = Classifier(), torch.randn(8, 6), torch.arange(8) % 4
    handle = autoamp.init(scope=scope, device_type="cpu", dtype=torch.bfloat16)
    expected, product = model(x, y), x @ x.t()
    entered, left, found = threading.Event(), threading.Event(), []

    def turn_off() -> None:
        with handle.disable_casts():
            entered.set()
            left.wait()
            found.append((x @ x.t()).dtype)

    other = threading.Thread(target=turn_off)

    def let_other_enter() -> None:
        if other.ident is None:
            other.start()
            entered.wait()

    def backend(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            let_other_enter()
            return graph.forward(*args)

        if during == "compilation":
            let_other_enter()
        return run

    compiled = torch.compile(model, backend=backend)
    try:
        outputs = [compiled(x, y) for _ in range(2)]
    finally:
        left.set()
        other.join()
    outputs.append(compiled(x, y))
    assert all(torch.equal(*pair) for output in outputs for pair in zip(output, expected, strict=True))
    assert found == [torch.float32]
    # Nothing of either is left.
    assert (x @ x.t()).dtype is product.dtype
    with handle.disable_casts():
        assert (x @ x.t()).dtype is torch.float32


INDUCTOR = """
import torch
from torch import nn
import autoamp

model, x = nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 3)), torch.randn(4, 6)
for half in (torch.float16, torch.bfloat16):
    handle = autoamp.init(device_type="cpu", dtype=half)
    found = []
    for function in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        output = function(x)
        with handle.scale_loss(output.float().square().mean(), []) as scaled_loss:
            scaled_loss.backward()
        found.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
    # Inductor fuses, and rounds in fewer places.
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * float(theirs.abs().max()))
print("close")
"""


# The default suite compiles for aot_eager, which takes no C++ compiler.
@pytest.mark.variants
def test_inductor(tmp_path: Path) -> None:
    # In a process of its own: its C++ compiler comes through setuptools, which must be the first to import distutils.
    ended = plainly(written(tmp_path, {"script.py": INDUCTOR}), "script.py")
    assert ended.out == "close\n", ended.err


# -- torch.jit --


@torch.jit.script_if_tracing
def scripted_if_traced(x: Tensor) -> Tensor:
    return torch.sigmoid(x) if x.sum() > 0 else x


def test_functions_are_scripted() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            mixed = torch.einsum("ij,kj->ik", x, weight)
        return F.softmax(torch.sigmoid(F.linear(mixed, weight)), dim=-1)

    x, weight = torch.randn(3, 3), torch.randn(3, 3)
    expected = function(x, weight)
    handle = autoamp.init(device_type="cpu")
    scripted = torch.jit.script(function)
    with handle.disable_casts():
        torch.testing.assert_close(scripted(x, weight), expected)
    assert torch.jit.trace(lambda a: scripted_if_traced(a), x.abs())(x.abs()).dtype is torch.float32
    handle.deactivate()
    torch.testing.assert_close(scripted(x, weight), expected)


def saved_and_loaded(model: nn.Module, x: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, x), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def made_fx(model: nn.Module, x: Tensor) -> Any:
    return make_fx(model)(x)


@pytest.mark.parametrize(
    ("traced", "cls"), [*((saved_and_loaded, cls) for cls in (ConvNet, Recurrent)), *((made_fx, cls) for cls in MODELS)]
)
def test_a_trace_holds_the_casts_and_runs_without_us(traced: Callable[..., Any], cls: Any) -> None:
    model, x = cls().eval(), torch.randn(cls.shape)
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    expected, program = model(x), traced(model, x)
    handle.deactivate()
    found = program(x)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


# -- torch.fx and torch.export --


@pytest.mark.parametrize("cls", MODELS)
def test_a_symbolic_trace_casts_while_we_are_active(cls: Any) -> None:
    model, x, half = cls().eval(), torch.randn(cls.shape), torch.bfloat16
    plain = model(x)
    handle = autoamp.init(device_type="cpu", dtype=half)
    traced = fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))
    assert not torch.equal(traced(x).float(), plain)
    handle.deactivate()
    # Its nodes are calls of functions by name, as in the source that was traced.
    assert torch.equal(traced(x), plain)
    assert torch.equal(fx.symbolic_trace(model)(x), plain)


def test_onnx_holds_the_casts() -> None:
    import onnx

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.Softmax(-1)).eval()
    autoamp.init(device_type="cpu", dtype=torch.float16)
    buffer = io.BytesIO()
    torch.onnx.export(model, (torch.randn(2, 3, 8, 8),), buffer, dynamo=False)
    graph = onnx.load_from_string(buffer.getvalue()).graph
    assert [node.op_type for node in graph.node].count("Cast") >= 2
    assert graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_onnx_has_the_parameters_of_half_models(level: str) -> None:
    """The exporter tells parameters by ``state_dict``, which gave fp32 values in their place."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autoamp.initialize(model, optimizer, opt_level=level, dtype=torch.float16, device_type="cpu", verbosity=0)
    try:
        x, buffer = torch.randn(2, 4), io.BytesIO()
        with autoamp.scale_loss(model(x).float().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        torch.onnx.export(model, (x,), buffer, dynamo=False)
        graph = onnx.load_from_string(buffer.getvalue())
        kinds = {one.data_type for one in graph.graph.initializer}
        assert kinds == {onnx.TensorProto.FLOAT16}
        (found,) = ReferenceEvaluator(graph).run(None, {graph.graph.input[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), atol=2e-3, rtol=2e-3)
        # What a program saves is in fp32 all the same.
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    finally:
        if (handle := autoamp.current_handle()) is not None:
            handle.deactivate()
