"""Transforms, parametrizations, hooks and tensors of other kinds work with patched functions."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.utils import parametrizations, parametrize

import autoamp

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


def test_jacobians_and_hessians_go_through_casts(handle: autoamp.Handle, model: nn.Module, x: Tensor) -> None:
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


def test_forward_mode_gradients_go_through_casts(handle: autoamp.Handle, model: nn.Module, x: Tensor) -> None:
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
@pytest.mark.parametrize(("shape", "early"), [((6, 6), False), ((6, 8), True)])
def test_parametrized_layers_are_cast_and_train(
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


# -- hooks --


def test_saved_tensor_hooks_see_half_tensors(handle: autoamp.Handle, model: nn.Module, x: Tensor) -> None:
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


# -- tensors of other kinds --


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_cast(handle: autoamp.Handle, model: nn.Sequential, layout: torch.layout) -> None:
    parts = [torch.randn(2, 6), torch.randn(3, 6)]
    output = F.linear(torch.nested.nested_tensor(parts, layout=layout), model[0].weight)
    assert output.dtype is HALF
    for got, part in zip(output.unbind(), parts, strict=True):
        torch.testing.assert_close(got, F.linear(part, model[0].weight))


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization", "ignore:.*quantized")
def test_quantized_modules_and_tensors_are_left_alone(model: nn.Module, x: Tensor) -> None:
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    tensor = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    expected, expected_relu = quantized(x), torch.relu(tensor).int_repr()
    autoamp.init(device_type="cpu", dtype=HALF)
    assert torch.equal(quantized(x), expected)
    assert torch.equal(torch.relu(tensor).int_repr(), expected_relu)


def test_the_profiler_sees_torchs_ops(handle: autoamp.Handle, model: nn.Module, x: Tensor) -> None:
    with torch.profiler.profile(with_stack=True) as profile:
        assert model(x).dtype is HALF
    assert "aten::linear" in {event.key for event in profile.key_averages()}
