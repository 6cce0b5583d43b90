"""Perceptrons and dense layers against plain layers of torch."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.compat.layers.mlp import (
    MLP,
    FusedDense,
    FusedDenseGeluDense,
    dense_no_bias_function,
    fused_dense_function,
    fused_dense_gelu_dense_function,
    mlp_function,
)
from autoamp.errors import UsageError

SIZES = [4, 6, 3]
FOLLOWERS = {"none": nn.Identity, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}


def reference(mlp: MLP, activation: str) -> nn.Sequential:
    """Return plain layers in fp64 with the weights of a perceptron."""
    layers: list[nn.Module] = []
    for place, weight in enumerate(mlp.weights):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(mlp.bias), dtype=torch.float64)
        layer.weight.data.copy_(weight.data)
        if mlp.bias:
            layer.bias.data.copy_(mlp.biases[place].data)
        layers += [layer, FOLLOWERS[activation]()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", FOLLOWERS)
def test_mlp_is_its_layers(bias: bool, activation: str) -> None:
    mlp = MLP(SIZES, bias=bias, activation=activation)
    plain = reference(mlp, activation)
    input = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    mine = input.detach().float().requires_grad_()
    mlp(mine).square().sum().backward()
    plain(input).square().sum().backward()
    torch.testing.assert_close(mlp(mine).double(), plain(input), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.grad.double(), input.grad, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]
    # By layer there, by kind in the same order here.
    for (name, parameter), other in zip(mlp.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.double(), other.grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("bias", [True, False])
def test_mlp_gradcheck(bias: bool) -> None:
    mlp = MLP([3, 4, 2], bias=bias, activation="sigmoid").double()
    input = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *given: mlp_function(mlp.bias, 2, *given), (input, *mlp.weights, *mlp.biases)
    )


def test_mlp_state_dict_has_the_names_of_apex() -> None:
    assert list(MLP(SIZES).state_dict()) == ["weight_0", "bias_0", "weight_1", "bias_1"]
    assert list(MLP(SIZES, bias=False).state_dict()) == ["weight_0", "weight_1"]
    one, other = MLP(SIZES), MLP(SIZES)
    other.load_state_dict(one.state_dict())
    input = torch.randn(2, 4)
    torch.testing.assert_close(one(input), other(input))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "double"])
def test_copies_have_weights_of_their_own(how: str) -> None:
    mlp = MLP(SIZES)
    if how == "pickle":
        buffer = io.BytesIO()
        torch.save(mlp, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    else:
        other = copy.deepcopy(mlp)
    if how == "double":
        other = other.double()
    assert all(one is two for one, two in zip(other.weights, [other.weight_0, other.weight_1], strict=True))
    before = mlp(torch.ones(1, 4))
    with torch.no_grad():
        other.weight_0.zero_()
    torch.testing.assert_close(mlp(torch.ones(1, 4)), before)


@pytest.mark.parametrize(
    ("args", "options", "expected"),
    [
        ((SIZES,), {}, 1),
        ((SIZES, True, True), {}, 1),
        ((SIZES, True, False), {}, 0),
        ((SIZES,), {"relu": False}, 0),
        ((SIZES,), {"relu": True}, 1),
        ((SIZES, True, "sigmoid"), {}, 2),
    ],
)
def test_both_forms_of_the_activation(args: Any, options: Any, expected: int) -> None:
    assert MLP(*args, **options).activation == expected


def test_mlp_repr() -> None:
    assert repr(MLP(SIZES)) == "MLP(mlp_sizes=[4, 6, 3], bias=1, activation='relu')"


def test_mlp_refuses() -> None:
    with pytest.raises(UsageError, match="activation='gelu'"):
        MLP(SIZES, activation="gelu")
    with pytest.raises(UsageError, match=r"mlp_sizes=\[4\]"):
        MLP([4])
    with pytest.raises(UsageError, match="activation=3"):
        mlp_function(0, 3, torch.ones(1, 1), torch.ones(1, 1))
    with pytest.raises(UsageError, match="3 in all"):
        mlp_function(1, 0, torch.ones(1, 1), *[torch.ones(1, 1)] * 3)


def gelu_dense(input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    hidden = input @ weight1.T + bias1
    return 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5)) @ weight2.T + bias2


def test_dense_layers_in_fp64() -> None:
    dense, both = FusedDense(4, 3).double(), FusedDenseGeluDense(4, 6, 3).double()
    input = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(dense(input), input @ dense.weight.T + dense.bias)
    torch.testing.assert_close(fused_dense_function(input, dense.weight, dense.bias), dense(input))
    torch.testing.assert_close(dense_no_bias_function(input, dense.weight), input @ dense.weight.T)
    weights = (both.weight1, both.bias1, both.weight2, both.bias2)
    torch.testing.assert_close(both(input), gelu_dense(input, *weights))
    assert torch.autograd.gradcheck(fused_dense_gelu_dense_function, (input, *weights))


def test_dense_layers_names_and_values() -> None:
    assert list(FusedDense(4, 3).state_dict()) == ["weight", "bias"]
    assert FusedDense(4, 3, bias=False).bias is None
    both = FusedDenseGeluDense(4, 6, 3)
    shapes = {name: tuple(value.shape) for name, value in both.state_dict().items()}
    assert shapes == {"weight1": (6, 4), "bias1": (6,), "weight2": (3, 6), "bias2": (3,)}
    # Drawn as nn.Linear draws them, not whatever was in memory.
    assert all(0 < float(value.detach().abs().max()) <= 0.5 for value in both.parameters())
    assert repr(both) == "FusedDenseGeluDense(4, 6, 3)"
    with pytest.raises(UsageError, match="bias=False"):
        FusedDenseGeluDense(4, 6, 3, bias=False)


@pytest.mark.parametrize("kind", ["mlp", "dense", "gelu"])
def test_under_casts(kind: str, half: torch.dtype) -> None:
    modules = {
        "mlp": lambda: MLP(SIZES),
        "dense": lambda: FusedDense(4, 3),
        "gelu": lambda: FusedDenseGeluDense(4, 6, 3),
    }
    module = modules[kind]()
    input = torch.randn(5, 4)
    expected = module(input)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    autoamp.init(dtype=half, device_type="cpu")
    output = module(input)
    assert output.dtype is half
    torch.testing.assert_close(output.float(), expected, rtol=5e-2, atol=5e-2)
    output.float().square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.dtype is torch.float32 for parameter in module.parameters()
    )
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_by_the_names_of_apex(apex: Any) -> None:
    from apex import fused_dense, mlp
    from apex.mlp.mlp import mlp_function as function

    module = mlp.MLP([4, 3])
    input = torch.randn(2, 4)
    torch.testing.assert_close(module(input), F.relu(F.linear(input, module.weight_0, module.bias_0)))
    torch.testing.assert_close(function(1, 1, input, module.weight_0, module.bias_0), module(input))
    assert fused_dense.FusedDense(4, 3)(input).shape == (2, 3)
