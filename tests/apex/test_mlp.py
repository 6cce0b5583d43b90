"""Perceptrons and dense layers: names of weights, copies, arguments, and their functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoamp.apex.fused_dense import FusedDense, FusedDenseGeluDense, fused_dense_function
from autoamp.apex.mlp import MLP, MlpFunction, mlp_function
from autoamp.errors import UsageError

SIZES = [4, 6, 3]


def test_functions_compute_as_the_modules() -> None:
    dense, both, mlp = FusedDense(4, 3), FusedDenseGeluDense(4, 6, 3), MLP(SIZES)
    input = torch.randn(2, 5, 4)
    torch.testing.assert_close(fused_dense_function(input, dense.weight, dense.bias), dense(input))
    inner = nn.functional.gelu(fused_dense_function(input, both.weight1, both.bias1))
    torch.testing.assert_close(fused_dense_function(inner, both.weight2, both.bias2), both(input))
    torch.testing.assert_close(mlp_function(1, 1, input, *mlp.weights, *mlp.biases), mlp(input))


def test_mlp_state_dict_has_the_names_of_apex() -> None:
    assert list(MLP(SIZES).state_dict()) == ["weight_0", "bias_0", "weight_1", "bias_1"]
    assert list(MLP(SIZES, bias=False).state_dict()) == ["weight_0", "weight_1"]
    assert repr(MLP(SIZES)) == "MLP(mlp_sizes=[4, 6, 3], bias=1, activation='relu')"


@pytest.mark.parametrize(
    ("args", "options", "expected"),
    [
        ((), {}, 1), ((True,), {}, 1), ((False,), {}, 0), ((), {"relu": False}, 0), ((), {"relu": True}, 1),
        (("sigmoid",), {}, 2),
    ],
)  # fmt: skip
def test_both_forms_of_the_activation(args: Any, options: Any, expected: int) -> None:
    assert MLP(SIZES, True, *args, **options).activation == expected


def test_mlp_refuses() -> None:
    with pytest.raises(UsageError, match="activation='gelu'"):
        MLP(SIZES, activation="gelu")
    with pytest.raises(UsageError, match=r"mlp_sizes=\[4\]"):
        MLP([4])
    with pytest.raises(UsageError, match="activation=3"):
        mlp_function(0, 3, torch.ones(1, 1), torch.ones(1, 1))
    with pytest.raises(UsageError, match="3 in all"):
        mlp_function(1, 0, torch.ones(1, 1), *[torch.ones(1, 1)] * 3)


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


class Wrapped(torch.autograd.Function):
    """As DLRM wraps it, to cast its arguments."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return MlpFunction.forward(*args)

    @staticmethod
    def backward(*args: Any) -> Any:
        return MlpFunction.backward(*args)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("function", [MlpFunction, Wrapped])
def test_the_function_has_the_gradients_of_the_module(function: Any, bias: bool) -> None:
    mlp, input = MLP(SIZES, bias, "sigmoid"), torch.randn(2, 4, requires_grad=True)
    of = [input, *mlp.parameters()]
    expected = torch.autograd.grad(mlp(input).square().sum(), of)
    output = function.apply(mlp.bias, mlp.activation, input, *mlp.weights, *mlp.biases)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), of), expected)
