"""A precision that was promised holds on every path: eager, compiled, exported, scripted, checkpointed, in threads.

The promises are `handle.override`, ``[modules]`` by path and by class, ``torch.autocast(enabled=False)`` and
`handle.disable_casts`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import operator
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp

FP32, HALF = torch.float32, torch.bfloat16

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}") for text in (".*torch.jit", "While compiling", "Dynamo does not know")
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    dynamo.reset()
    yield
    dynamo.reset()


class Ops(nn.Module):
    """Products in all spellings: a function, an operator, methods, and functions of torch that call others."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, t: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        attended = self.attention(t, t, t, need_weights=False)[0]
        return torch.matmul(t, w), t @ w, t.mm(w), torch.Tensor.mm(t, w), F.linear(t, w), (t @ w).addmm(t, w), attended


class Plain(nn.Module):
    """Calls the ops, and then makes a product that nothing is promised for."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = Ops() if inner is None else inner

    def call(self, t: Tensor, w: Tensor) -> Any:
        return self.inner(t, w)

    def forward(self, t: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (*self.call(t, w), t @ w)


class Region(Plain):
    """Turns autocast off."""

    def call(self, t: Tensor, w: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.inner(t, w)


class Decorated(Plain):
    """Turns autocast off by a decorator."""

    @torch.autocast("cpu", enabled=False)
    def call(self, t: Tensor, w: Tensor) -> Any:
        return self.inner(t, w)


class Within(Plain):
    """Turns the casts of a handle off."""

    handle: Any = None

    def call(self, t: Tensor, w: Tensor) -> Any:
        with self.handle.disable_casts():
            return self.inner(t, w)


class Checkpointed(Plain):
    """Recomputes the ops in backward."""

    reentrant = False

    def call(self, t: Tensor, w: Tensor) -> Any:
        return checkpoint(super().call, t, w, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    """The same in the older way, which is not compiled."""

    reentrant = True


def init(modules: dict[str, str] | None = None, **settings: Any) -> autoamp.Handle:
    lists = {"extends": ["bf16"], "modules": modules or {}}
    return autoamp.init(device_type="cpu", dtype=HALF, lists=lists, **settings)


def by_override(kind: type[Plain]) -> Plain:
    model = kind()
    init().override(model.inner, "fp32")
    return model


def by_path(kind: type[Plain]) -> Plain:
    model = kind()
    init({"inner": "fp32"}).override(model)
    return model


def by_class(kind: type[Plain]) -> Plain:
    init({f"{__name__}.Ops": "fp32"})
    return kind()


def by_region(around: type[Plain]) -> Callable[[type[Plain]], Plain]:
    def build(kind: type[Plain]) -> Plain:
        handle = init()
        bases = (around,) if kind is Plain else (kind, around)
        return type(kind.__name__, bases, {"handle": handle})()

    return build


PROMISES: dict[str, Callable[[type[Plain]], Plain]] = {
    "override": by_override,
    "path": by_path,
    "class": by_class,
    "region": by_region(Region),
    "decorator": by_region(Decorated),
    "disable_casts": by_region(Within),
}


def values() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


Found = tuple[list[torch.dtype], list[Tensor], tuple[Tensor, ...]]


def trained(function: Any, t: Tensor, w: Tensor) -> Found:
    """The dtypes of the outputs, the outputs, and the gradients."""
    outputs = function(t, w)
    total = torch.stack([output.float().square().sum() for output in outputs]).sum()
    total.backward()
    gradients = t.grad, w.grad
    t.grad = w.grad = None
    return [output.dtype for output in outputs], list(outputs), gradients


def assert_kept(found: Found, expected: Found, path: str) -> None:
    assert found[0] == expected[0], path
    assert all(map(torch.equal, found[1], expected[1])), path
    for ours, theirs in zip(found[2], expected[2], strict=True):
        # Compiled code adds up in another order.
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"{path}: {text}")


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("kind", [Plain, Checkpointed, Reentrant])
def test_a_promise_holds_in_eager_mode_and_in_compiled_code(promise: str, kind: type[Plain]) -> None:
    model, (t, w) = PROMISES[promise](kind), values()
    expected = trained(model, t, w)
    assert expected[0] == [FP32] * 7 + [HALF]
    with ThreadPoolExecutor(1) as pool:
        assert_kept(pool.submit(trained, model, t, w).result(), expected, "a thread")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert [output.dtype for output in model(t, w)] == expected[0], mode.__name__
    if kind is Reentrant:
        return
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert_kept(trained(compiled, t, w), expected, backend)
        with torch.no_grad():
            assert [output.dtype for output in compiled(t, w)] == expected[0], backend
        function = torch.compile(lambda t, w: model(t, w), backend=backend, fullgraph=True)
        assert_kept(trained(function, t, w), expected, f"{backend}, a function that calls the model")
        with ThreadPoolExecutor(1) as pool:
            assert_kept(pool.submit(trained, function, t, w).result(), expected, f"{backend} in a thread")


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_holds_in_what_is_exported_and_traced(promise: str) -> None:
    model, (t, w) = PROMISES[promise](Plain), values()
    expected = trained(model, t, w)
    programs = {f"{strict=}": torch.export.export(model, (t, w), strict=strict).module() for strict in (False, True)}
    for path, program in {**programs, "trace": torch.jit.trace(model, (t, w))}.items():
        found = program(t, w)
        assert [output.dtype for output in found] == expected[0], path
        torch.testing.assert_close(found, tuple(expected[1]), msg=lambda text, path=path: f"{path}: {text}")


class Rotary(nn.Module):
    """The table of angles in fp32, with a reflected division."""

    def forward(self, t: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            frequencies = 1.0 / 10000 ** (torch.arange(0, 64, 2).float() / 64)
            return t @ w, (frequencies[:, None] @ torch.arange(4096.0)[None, :]).cos()


class Operators(nn.Module):
    """The operators that have a name of their own if the second operand is the tensor."""

    def forward(self, t: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        t = t.abs() + 1
        names = ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod")
        both = [getattr(operator, name) for name in names]
        return (t @ w, *(one(t.bfloat16(), w.abs() + 1) for one in both), *(one(2.0, t.bfloat16()) for one in both))


class CustomInRegion(nn.Module):
    def forward(self, t: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            promised = Custom.apply(t, w)
        return promised, Custom.apply(t, w)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("program", ["Rotary", "Operators", "CustomInRegion", "Nested", "half within fp32"])
def test_an_exported_program_computes_what_the_model_does(program: str, strict: bool) -> None:
    handle, (t, w) = init(), values()
    if program == "half within fp32":
        model: nn.Module = Plain(Plain())
        handle.override(model.inner, "fp32")
        handle.override(model.inner.inner, "fp16")
    else:
        model = globals()[program]()
    expected = model(t, w)
    exported = torch.export.export(model, (t, w), strict=strict).module()
    for deactivate in (lambda: None, handle.deactivate):
        deactivate()
        found = exported(t, w)
        assert [one.dtype for one in found] == [one.dtype for one in expected]
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("scope", ["global", "modules"])
def test_compiled_code_follows_the_switches_around_it(scope: Any) -> None:
    handle, (t, w) = init(scope=scope), values()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled = torch.compile(lambda t: (model[0](t), model[1](t).matmul(w), t @ w), backend="aot_eager", fullgraph=True)
    for around in (contextlib.nullcontext, handle.disable_casts, lambda: torch.autocast("cpu", enabled=False)) * 2:
        with around():
            dtypes = [output.dtype for output in compiled(t)]
            assert dtypes == [output.dtype for output in (model[0](t), model[1](t).matmul(w), t @ w)]


class Nested(nn.Module):
    """Regions within regions, and a graph break in one."""

    breaks = False

    def forward(self, t: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            outputs = [t @ w]
            with torch.autocast("cpu", dtype=torch.float16):
                outputs.append(t @ w)
                with torch.autocast("cpu", enabled=False):
                    outputs.append(t.mm(w))
                outputs.append(t.mm(w))
            if self.breaks:
                dynamo.graph_break()
            outputs.append(torch.mm(t, w))
        return (*outputs, t @ w)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_nested_regions_and_graph_breaks_within_them(backend: str, breaks: bool) -> None:
    init()
    model, (t, w) = Nested(), values()
    model.breaks = breaks
    expected = trained(model, t, w)
    assert expected[0] == [FP32, torch.float16, FP32, torch.float16, FP32, HALF]
    assert_kept(trained(torch.compile(model, backend=backend, fullgraph=not breaks), t, w), expected, backend)


class Custom(torch.autograd.Function):
    """A custom function with decorators of torch, which does its own casts under autocast alone."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, t: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(t, w)
        return t.mm(w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        t, w = ctx.saved_tensors
        return grad.to(w.dtype).mm(w.t()), t.t().mm(grad.to(t.dtype))


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_custom_functions_within_a_promise(backend: str, promised: bool) -> None:
    init()
    t, w = values()

    def function(t: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", enabled=False) if promised else contextlib.nullcontext():
            return Custom.apply(t, w), t @ w

    expected = trained(function, t, w)
    assert expected[0] == [FP32, FP32 if promised else HALF]
    assert_kept(trained(torch.compile(function, backend=backend, fullgraph=True), t, w), expected, backend)


@torch.compiler.allow_in_graph
def allowed(t: Tensor, w: Tensor) -> Tensor:
    return t @ w


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functions_that_a_program_allows_in_graphs_cast_as_in_eager_mode(backend: str) -> None:
    def function(t: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            promised = allowed(t, w)
        return promised, allowed(t, w)

    init()
    found = torch.compile(function, backend=backend, fullgraph=True)(*values())
    assert [output.dtype for output in found] == [FP32, HALF]


# -- TorchScript --


class Layers(nn.Module):
    """What is scripted: no product of it takes halves beside fp32 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def loaded(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("scripted_first", [False, True])
def test_scripted_modules_run_under_autocast(scripted_first: bool, load: bool) -> None:
    torch.manual_seed(0)
    layers, before, (x, _) = Layers(), nn.Linear(4, 4), values()
    handle = None if scripted_first else init()
    scripted: nn.Module = torch.jit.script(layers)
    scripted = loaded(scripted) if load else scripted
    handle = init() if handle is None else handle
    model = nn.Sequential(before, scripted)
    output = model(x)
    assert output.dtype is HALF
    output.float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype is FP32 for parameter in model.parameters())
    with handle.disable_casts():
        plain = model(x)
        with torch.autocast("cpu", dtype=HALF):
            assert torch.equal(model(x), output)
    assert plain.dtype is FP32
    for promised in (model, scripted):
        with handle.override(promised, "fp32"):
            assert model(x).dtype is FP32
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(model(x), plain)
    with torch.no_grad():
        scripted.last.bias.add_(1)
    assert torch.allclose(model(x), output + 1, atol=0.05)
    handle.deactivate()
    assert model(x).dtype is FP32


def test_scripted_functions_run_under_autocast() -> None:
    @torch.jit.script
    def product(t: Tensor, w: Tensor) -> Tensor:
        return t @ w

    handle, (t, w) = init(), values()
    assert product(t.bfloat16(), w).dtype is HALF
    with handle.disable_casts():
        assert product(t, w).dtype is FP32


class OwnCasts(Layers):
    """Casts a value to half that is no weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.to(torch.half)) * (x.sum(1, keepdim=True) > 0).to(torch.bfloat16))


@pytest.mark.parametrize("load", [False, True])
def test_a_script_with_casts_of_its_own_runs_under_autocast(load: bool) -> None:
    torch.manual_seed(0)
    scripted: nn.Module = torch.jit.script(OwnCasts())
    scripted = loaded(scripted) if load else scripted
    x, _ = values()
    with torch.autocast("cpu", dtype=HALF):
        expected = scripted(x)
    init()
    assert expected.dtype is HALF
    assert torch.equal(scripted(x), expected)


def test_a_script_is_not_kept_alive() -> None:
    init()
    scripted: Any = torch.jit.script(Layers())
    scripted(values()[0])
    kept = [weakref.ref(one) for one in (scripted.forward, scripted.forward.graph)]
    del scripted
    gc.collect()
    assert [one() for one in kept] == [None, None]


@pytest.mark.parametrize("load", [False, True])
def test_a_trace_with_casts_is_not_cast_again(load: bool) -> None:
    model, (t, w) = by_override(Plain), values()
    traced: Any = torch.jit.trace(model, (t, w))
    traced = loaded(traced) if load else traced
    assert [output.dtype for output in traced(t, w)] == [FP32] * 7 + [HALF]


# -- code that is shared --


def test_code_that_instances_share_is_compiled_for_each_precision() -> None:
    handle, (t, w), models = init(), values(), [Plain(), Plain()]
    compiled = [torch.compile(model, backend="eager", fullgraph=True) for model in models]

    def dtypes() -> list[torch.dtype]:
        return [model(t, w)[0].dtype for model in compiled]

    with handle.override(models[1].inner, "fp32"):
        assert dtypes() == [HALF, FP32]
        # An override after the first call, and its end.
        with handle.override(models[0].inner, "fp32"):
            assert dtypes() == [FP32, FP32]
        assert dtypes() == [HALF, FP32]


def test_compiled_code_leaves_the_names_of_the_program() -> None:
    handle = init()
    namespace: dict[str, Any] = {"torch": torch, "handle": handle}
    source = "def f(a):\n    with handle.disable_casts():\n        return torch.nn.functional.normalize(a @ a)\n"
    exec(source, namespace)
    assert torch.compile(namespace["f"], backend="eager")(torch.randn(4, 4)).dtype is FP32
    assert not {"set", "reset", "now"} & set(namespace)


def test_a_frozen_script_takes_half_inputs() -> None:
    frozen = torch.jit.freeze(torch.jit.script(nn.Linear(4, 4).eval()))
    init()
    assert frozen(torch.ones(2, 4, dtype=HALF)).dtype is HALF
