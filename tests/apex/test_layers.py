"""Dense layers and a norm against torch's functions, with the same inputs and weights, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import autoamp
from autoamp.apex import fused_dense, mlp
from autoamp.apex.contrib import layer_norm

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
Shape = tuple[int, ...]


@dataclass
class Case:
    """A function of autoamp and one of torch, called with the same tensors: inputs by place, weights by name."""

    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    inputs: list[Shape]
    weights: dict[str, Shape]


def layer(module: nn.Module, theirs: Callable[..., Tensor], *inputs: Shape) -> Case:
    names = {name.replace(".", "_"): name for name, _ in module.named_parameters()}

    def ours(*given: Tensor, **weights: Tensor) -> Tensor:
        return functional_call(module, {names[name]: weight for name, weight in weights.items()}, given)  # type: ignore[no-any-return]

    shapes = {name: tuple(module.get_parameter(own).shape) for name, own in names.items()}
    return Case(ours, theirs, list(inputs), shapes)


def perceptron(bias: bool, activation: str) -> Case:
    following: Any = {"none": lambda x: x, "relu": F.relu, "sigmoid": torch.sigmoid}[activation]

    def theirs(x: Tensor, **weights: Tensor) -> Tensor:
        for place in (0, 1):
            x = following(F.linear(x, weights[f"weight_{place}"], weights.get(f"bias_{place}")))
        return x

    return layer(mlp.MLP([4, 6, 3], bias=bias, activation=activation), theirs, (5, 4))


def gelu_dense(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)


CASES = {
    "layer norm": layer(
        layer_norm.FastLayerNorm(6, eps=1e-3), lambda x, weight, bias: F.layer_norm(x, (6,), weight, bias, 1e-3), (3, 6)
    ),
    "mlp": perceptron(True, "relu"),
    "mlp, sigmoid": perceptron(True, "sigmoid"),
    "mlp, no activation": perceptron(False, "none"),
    "dense": layer(fused_dense.FusedDense(4, 3), F.linear, (2, 5, 4)),
    "dense, no bias": layer(fused_dense.FusedDense(4, 3, bias=False), F.linear, (5, 4)),
    "dense, gelu": layer(fused_dense.FusedDenseGeluDense(4, 6, 3), gelu_dense, (5, 4)),
}


def check(case: Case, dtype: torch.dtype, weight_dtype: torch.dtype, tolerance: float) -> Tensor:
    """Compare outputs and the gradients of all inputs and weights, and return our output."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in case.inputs]
    weights = {
        name: (torch.randn(shape) * 0.5).to(weight_dtype).requires_grad_() for name, shape in case.weights.items()
    }
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wide_weights = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}
    found, expected = case.ours(*inputs, **weights), case.theirs(*wide, **wide_weights)
    torch.testing.assert_close(found.detach().double(), expected.detach(), rtol=tolerance, atol=tolerance)
    factors = torch.randn(expected.shape, dtype=torch.float64)
    (found.double() * factors).sum().backward()
    (expected * factors).sum().backward()
    for one, other in zip([*inputs, *weights.values()], [*wide, *wide_weights.values()], strict=True):
        assert one.grad is not None
        assert one.grad.dtype is one.dtype
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=tolerance, atol=10 * tolerance)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_layer_matches_torch(case: Case, dtype: torch.dtype) -> None:
    assert check(case, dtype, dtype, TOLERANCE[dtype]).dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norm_with_fp32_weights_matches_torch(dtype: torch.dtype) -> None:
    assert check(CASES["layer norm"], dtype, torch.float32, TOLERANCE[dtype]).dtype is dtype


@pytest.mark.parametrize("name", CASES)
def test_layer_under_casts_matches_torch(name: str, half: torch.dtype) -> None:
    autoamp.init(dtype=half, device_type="cpu")
    found = check(CASES[name], torch.float32, torch.float32, TOLERANCE[half])
    if name.startswith(("mlp", "dense")):
        assert found.dtype is half
    if "norm" in name:
        assert found.dtype is torch.float32
