"""Dense layers with the signatures of `apex.fused_dense`, on torch's own functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from autoamp.errors import UsageError


class FusedDense(torch.nn.Linear):
    """`torch.nn.Linear`. Arguments ``(in_features, out_features, bias=True)``."""


class FusedDenseGeluDense(Module):
    """A linear layer, GELU (the exact one, by erf) and a linear layer.

    Args:
        in_features: The features of the input.
        intermediate_features: The features between the two layers.
        out_features: The features of the output.
        bias: Must be True.

    Raises:
        UsageError: ``bias=False``.
    """

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        if not bias:
            raise UsageError(
                "FusedDenseGeluDense: bias=False is not supported; leave it True, or use nn.Linear and nn.GELU"
            )
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        first = torch.nn.Linear(in_features, intermediate_features)
        second = torch.nn.Linear(intermediate_features, out_features)
        self.weight1, self.bias1 = first.weight, first.bias
        self.weight2, self.bias2 = second.weight, second.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the output, shape ``(*, out_features)``, for input of ``(*, in_features)``."""
        return F.linear(F.gelu(F.linear(input, self.weight1, self.bias1)), self.weight2, self.bias2)

    def extra_repr(self) -> str:
        """Say what the constructor was given."""
        return f"{self.in_features}, {self.intermediate_features}, {self.out_features}"


def fused_dense_function(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``input @ weight.T + bias``; shapes ``(*, n)``, ``(m, n)``, ``(m,)``."""
    return F.linear(input, weight, bias)
