"""Transforms, parametrizations, hooks, modes and tensors of other kinds: each at peace with the patches."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import os
import pickle
import pydoc
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
import wrapt
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.patching.marks import original_of

HALF = torch.bfloat16


@pytest.fixture
def handle() -> autoamp.Handle:
    return autoamp.init(device_type="cpu", dtype=HALF)


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6)


def total(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().sum()


# -- torch.func and forward-mode AD --


def test_gradients_of_a_functional_call(handle: autoamp.Handle, model: nn.Module, x: Tensor) -> None:
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(total(model, x), list(parameters.values()))

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).float().square().sum()

    got = grad(loss)(parameters, x)
    assert all(map(torch.equal, got.values(), expected))
    by_sample = vmap(grad(loss), in_dims=(None, 0))({name: p.detach() for name, p in parameters.items()}, x)
    for name, gradient in zip(parameters, expected, strict=True):
        assert by_sample[name].dtype is torch.float32
        torch.testing.assert_close(by_sample[name].sum(0), gradient, rtol=0.05, atol=0.05)


def test_vmap_and_ensembles(handle: autoamp.Handle, model: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(vmap(model)(x), model(x), rtol=0.1, atol=0.01)
    assert vmap(model)(x).dtype is HALF
    assert vmap(lambda row: F.softmax(model(row), -1))(x).dtype is F.softmax(model(x), -1).dtype
    models = [nn.Linear(6, 3) for _ in range(3)]
    stacked, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    got = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(stacked, buffers)
    torch.testing.assert_close(got, torch.stack([one(x) for one in models]), rtol=0.1, atol=0.01)


def test_jacobians(handle: autoamp.Handle, model: nn.Module, x: Tensor) -> None:
    row, tangent = x[0], torch.ones(6)
    backward = jacrev(lambda value: model(value).float())(row)
    forward = jacfwd(lambda value: model(value).float())(row)
    torch.testing.assert_close(forward.float(), backward.float(), rtol=0.05, atol=0.02)
    with handle.disable_casts():
        exact = jacrev(model)(row)
    torch.testing.assert_close(backward.float(), exact, rtol=0.05, atol=0.02)
    value, derivative = jvp(model, (row,), (tangent,))
    assert value.dtype is derivative.dtype is HALF
    torch.testing.assert_close(derivative.float(), exact.sum(1), rtol=0.05, atol=0.05)
    _, pull_back = vjp(model, row)
    assert pull_back(torch.ones(3, dtype=HALF))[0].dtype is torch.float32
    assert hessian(lambda value: total(model, value))(row).shape == (6, 6)


def test_forward_mode(handle: autoamp.Handle, model: nn.Module, x: Tensor) -> None:
    with forward_ad.dual_level():
        dual = model(forward_ad.make_dual(x, torch.ones_like(x)))
        primal, tangent = forward_ad.unpack_dual(dual)
        assert torch.equal(primal, model(x))
        assert tangent is not None
        assert tangent.dtype is HALF
        assert forward_ad.unpack_dual(F.softmax(dual, -1)).tangent is not None


# -- parametrizations --


@pytest.mark.parametrize(
    "parametrized",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        functools.partial(parametrizations.orthogonal, orthogonal_map="cayley"),
        functools.partial(parametrizations.orthogonal, orthogonal_map="householder"),
    ],
)
@pytest.mark.parametrize("shape", [(6, 6), (6, 8)])
@pytest.mark.parametrize("early", [False, True])
def test_parametrizations(
    parametrized: Callable[..., nn.Module], shape: tuple[int, int], early: bool, x: Tensor
) -> None:
    layer: Any = parametrized(nn.Linear(*shape)) if early else nn.Linear(*shape)
    handle = autoamp.init(device_type="cpu", dtype=HALF)
    layer = layer if early else parametrized(layer)
    output = layer(x)
    assert output.dtype is HALF
    output.float().sum().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    layer.eval()
    with parametrize.cached():
        cached = layer(x)
    with handle.disable_casts():
        torch.testing.assert_close(cached.float(), layer(x), rtol=0.1, atol=0.05)


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated")
def test_the_weight_norm_of_old(handle: autoamp.Handle, x: Tensor) -> None:
    layer: Any = nn.utils.weight_norm(nn.Linear(6, 8))
    layer(x).float().sum().backward()
    assert layer.weight_g.grad.dtype is torch.float32


# -- hooks --


def test_saved_tensor_hooks(handle: autoamp.Handle, model: nn.Module, x: Tensor) -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> tuple[Tensor]:
        packed.append(tensor)
        return (tensor,)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held[0]):
        loss = total(model, x)
    expected = torch.autograd.grad(total(model, x), list(model.parameters()))
    loss.backward()
    assert {HALF} <= {tensor.dtype for tensor in packed}
    assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))
    with torch.autograd.graph.save_on_cpu():
        loss = total(model, x)
    assert all(map(torch.equal, torch.autograd.grad(loss, list(model.parameters())), expected))


def test_module_and_tensor_hooks(handle: autoamp.Handle, model: nn.Sequential, x: Tensor) -> None:
    seen: list[Any] = []
    model[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model[0].register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    model[2].register_full_backward_hook(lambda _, grad_in, grad_out: seen.append(grad_out[0].dtype))
    hidden = model[0](x)
    hidden.register_hook(lambda gradient: seen.append(gradient.dtype))
    model[2](model[1](hidden)).float().sum().backward()
    assert seen == [torch.float32, HALF, HALF, HALF]


class Cube(torch.autograd.Function):
    """A function that notes the dtypes it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * gradient * x * x


def test_a_policy_for_a_custom_function(handle: autoamp.Handle, model: nn.Module, x: Tensor) -> None:
    hidden = model(x)
    assert Cube.apply(hidden).dtype is HALF
    in_fp32 = autoamp.float_function(Cube.apply)(hidden)
    assert in_fp32.dtype is torch.float32
    (gradient,) = torch.autograd.grad(in_fp32.sum(), hidden)
    assert gradient.dtype is HALF
    torch.testing.assert_close(gradient, (3 * hidden.float() ** 2).to(HALF))
    assert autoamp.half_function(Cube.apply)(x).dtype is HALF
    torch.autograd.gradcheck(
        autoamp.promote_function(Cube.apply), torch.randn(3, dtype=torch.float64, requires_grad=True)
    )


# -- modes and tensors of other kinds --


class Kind(Tensor):
    """A subclass that leaves everything to torch."""


def test_subclasses_keep_their_kind(handle: autoamp.Handle, model: nn.Sequential, x: Tensor) -> None:
    output = F.linear(x.as_subclass(Kind), model[0].weight)
    assert type(output) is Kind
    assert output.dtype is HALF
    assert type(F.softmax(output, -1)) is Kind


class Ops(TorchDispatchMode):
    """Notes the ops that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_the_casts(handle: autoamp.Handle, model: nn.Sequential, x: Tensor) -> None:
    with Ops() as ops:
        F.linear(x, model[0].weight)
    assert ops.names.count("aten._to_copy.default") == 2
    assert "aten.mm.default" in ops.names


def test_fake_and_meta_tensors(handle: autoamp.Handle) -> None:
    with FakeTensorMode():
        layer = nn.Linear(6, 4)
        output = layer(torch.randn(3, 6))
        output.float().sum().backward()
        assert output.dtype is HALF
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype is torch.float32
    on_meta = nn.Linear(6, 4, device="meta")
    assert on_meta(torch.empty(3, 6, device="meta")).dtype is torch.float32
    handle.deactivate()
    with autoamp.region(device_type="meta", dtype=HALF):
        assert on_meta(torch.empty(3, 6, device="meta")).dtype is HALF


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(handle: autoamp.Handle, model: nn.Sequential, layout: torch.layout) -> None:
    parts = [torch.randn(2, 6), torch.randn(3, 6)]
    output = F.linear(torch.nested.nested_tensor(parts, layout=layout), model[0].weight)
    assert output.dtype is HALF
    for got, part in zip(output.unbind(), parts, strict=True):
        torch.testing.assert_close(got, F.linear(part, model[0].weight))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors(handle: autoamp.Handle, x: Tensor) -> None:
    for sparse in (torch.eye(6).to_sparse(), torch.eye(6).to_sparse_csr()):
        # In half precision or in fp32, as the layout has kernels for it.
        torch.testing.assert_close(torch.mm(sparse, x.T).float(), x.T, atol=0.02, rtol=0.01)
        torch.testing.assert_close((sparse @ x.T).float(), x.T, atol=0.02, rtol=0.01)


def test_distributed_tensors(handle: autoamp.Handle, model: nn.Sequential, x: Tensor, tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        output = F.linear(
            distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(model[0].weight, mesh, [Replicate()])
        )
        assert type(output) is DTensor
        assert output.dtype is HALF
        assert torch.equal(output.to_local(), F.linear(x, model[0].weight))
        spread = distribute_module(copy.deepcopy(model), mesh)
        spread(distribute_tensor(x, mesh, [Shard(0)])).to_local().float().sum().backward()
        assert all(parameter.grad.dtype is torch.float32 for parameter in spread.parameters())
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization", "ignore:.*quantized")
def test_quantized_modules_and_tensors_are_left_alone(model: nn.Module, x: Tensor) -> None:
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    tensor = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    expected, expected_relu = quantized(x), torch.relu(tensor).int_repr()
    autoamp.init(device_type="cpu", dtype=HALF)
    assert torch.equal(quantized(x), expected)
    assert torch.equal(torch.relu(tensor).int_repr(), expected_relu)


# -- pickle, copies, inspection --


class Holder(nn.Module):
    """A model that holds patched functions in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.activation = torch.sigmoid
        self.normalise = functools.partial(F.softmax, dim=-1)
        self.table = {"sum": torch.sum, "method": Tensor.softmax}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.normalise(self.activation(self.linear(x)))
        return self.table["method"](hidden, -1) + self.table["sum"](hidden)


LOADS = """
    import sys, torch
    holder = type(sys)(sys.argv[3])
    exec(open(sys.argv[2]).read(), vars(holder))
    sys.modules[holder.__name__] = holder
    package = holder.__name__.rpartition(".")[0]
    while package:
        sys.modules[package] = type(sys)(package)
        package = package.rpartition(".")[0]
    model, x, expected = torch.load(sys.argv[1], weights_only=False)
    assert torch.equal(model(x), expected)
    assert model.activation is torch.sigmoid and model.table["method"] is torch.Tensor.softmax
    assert not any(name.partition(".")[0] == "autoamp" for name in sys.modules)
    print("loaded")
"""


def test_a_model_that_holds_patched_functions_is_copied_saved_and_loaded_elsewhere(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    handle = autoamp.init(device_type="cpu", dtype=HALF)
    # Made while the patches are in place, so what it holds are replacements.
    model = Holder()
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    with handle.disable_casts():
        expected = model(x).detach()
    torch.save((model, x, expected), tmp_path / "model.pt")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer).keys() == model.state_dict().keys()
    handle.deactivate()
    assert torch.equal(model(x), expected)
    (tmp_path / "loads.py").write_text(textwrap.dedent(LOADS), encoding="utf-8")
    (tmp_path / "holder.py").write_text(
        "import functools, torch\nimport torch.nn.functional as F\nfrom torch import Tensor, nn\n"
        + inspect.getsource(Holder),
        encoding="utf-8",
    )
    command = [sys.executable, "loads.py", "model.pt", "holder.py", Holder.__module__]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.stdout == "loaded\n", done.stderr


def test_every_replacement_is_inspected_as_its_original(handle: autoamp.Handle) -> None:
    count = 0
    for owner in (torch, F, Tensor, torch.linalg, torch.special, torch.fft):
        for name, replacement in list(vars(owner).items()):
            original = original_of(replacement)
            if original is replacement:
                continue
            count += 1
            assert replacement.__name__ == original.__name__
            assert replacement.__doc__ == original.__doc__
            assert callable(replacement)
            assert not isinstance(replacement, type)
            try:
                signature = inspect.signature(original)
            except ValueError:
                signature = None
            if signature is not None:
                assert inspect.signature(replacement) == signature
            assert original.__name__ in pydoc.render_doc(replacement)
            assert pickle.loads(pickle.dumps(replacement)) is replacement, (owner, name)
    assert count > 100
    assert F.interpolate is torch.nn.functional.interpolate


# -- other patchers --


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("first_out", ["ours", "theirs"])
@pytest.mark.parametrize("kind", ["mock", "wrapt"])
def test_other_patchers_in_any_order(kind: str, first_out: str, before: bool) -> None:
    original, calls = F.linear, []
    x = torch.randn(2, 2)

    def patch() -> Callable[[], None]:
        if kind == "mock":
            below = F.linear
            patcher = mock.patch.object(F, "linear", side_effect=lambda *a, **k: (calls.append(1), below(*a, **k))[1])
            patcher.start()
            return lambda: (patcher.stop(), None)[1]
        below = F.linear
        F.linear = wrapt.FunctionWrapper(below, lambda f, _, a, k: (calls.append(1), f(*a, **k))[1])
        return lambda: setattr(F, "linear", below)

    undo = patch() if before else None
    handle = autoamp.init(device_type="cpu", dtype=HALF)
    undo = undo or patch()
    assert F.linear(x, x).dtype is HALF
    assert calls == [1]
    steps = [handle.deactivate, undo] if first_out == "ours" else [undo, handle.deactivate]
    for step in steps:
        step()
    # What was taken away in the order of putting it there may leave one of both standing, with nothing in it.
    assert F.linear(x, x).dtype is torch.float32
    assert original_of(F.linear) is original or F.linear is original or before
    F.linear = original


def test_the_profiler(handle: autoamp.Handle, model: nn.Module, x: Tensor) -> None:
    with torch.profiler.profile(with_stack=True) as profile:
        assert model(x).dtype is HALF
    assert "aten::linear" in {event.key for event in profile.key_averages()}
