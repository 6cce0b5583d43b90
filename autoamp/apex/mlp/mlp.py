"""Perceptrons with the signatures of `apex.mlp`, on torch's own functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from autoamp.errors import UsageError

# The place in this tuple is the number that `mlp_function` takes.
_ACTIVATIONS = ("none", "relu", "sigmoid")


class MLP(Module):
    """Linear layers, each followed by the activation, the last one too.

    The parameters are ``weight_0``, ``bias_0``, ``weight_1``, ...; weight ``i`` has the shape
    ``(mlp_sizes[i + 1], mlp_sizes[i])``.

    Args:
        mlp_sizes: The number of features of the input and of each layer's output.
        bias: Whether there are biases.
        activation: ``"none"``, ``"relu"`` or ``"sigmoid"``.
        relu: The older form: True is ``activation="relu"``, False ``"none"``. A bool as the third argument counts as
            this one.

    Raises:
        UsageError: Another activation, or fewer than two sizes.
    """

    def __init__(
        self, mlp_sizes: Sequence[int], bias: bool = True, activation: str | bool = "relu", *, relu: bool | None = None
    ) -> None:
        super().__init__()
        older = activation if isinstance(activation, bool) else relu
        name = activation if older is None else ("relu" if older else "none")
        if name not in _ACTIVATIONS:
            raise UsageError(f"MLP: activation={activation!r} is unknown; choose 'none', 'relu' or 'sigmoid'")
        if len(mlp_sizes) < 2:
            raise UsageError(f"MLP: mlp_sizes={mlp_sizes!r} makes no layer; give the input's size and each layer's")
        self.mlp_sizes = list(mlp_sizes)
        self.num_layers = len(self.mlp_sizes) - 1
        self.bias = int(bias)
        self.activation = _ACTIVATIONS.index(str(name))
        for place, (inputs, outputs) in enumerate(zip(self.mlp_sizes, self.mlp_sizes[1:], strict=False)):
            self.register_parameter(f"weight_{place}", Parameter(torch.empty(outputs, inputs)))
            if bias:
                self.register_parameter(f"bias_{place}", Parameter(torch.empty(outputs)))
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        """The weights, in order."""
        return [getattr(self, f"weight_{place}") for place in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        """The biases, in order; none with ``bias=False``."""
        return [getattr(self, f"bias_{place}") for place in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 2 / (inputs + outputs)) and the biases from N(0, 1 / outputs)."""
        for weight in self.weights:
            torch.nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
        for bias in self.biases:
            torch.nn.init.normal_(bias, 0.0, math.sqrt(1.0 / bias.numel()))

    def forward(self, input: Tensor) -> Tensor:
        """Return the last layer's output, shape ``(*, mlp_sizes[-1])``, for input of ``(*, mlp_sizes[0])``."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Say what the constructor was given."""
        return f"mlp_sizes={self.mlp_sizes}, bias={self.bias}, activation={_ACTIVATIONS[self.activation]!r}"


class MlpFunction(torch.autograd.Function):
    """`mlp_function` as an autograd function, whose two static methods programs call from functions of their own."""

    @staticmethod
    def forward(ctx: Any, bias: int, activation: int, *tensors: Tensor) -> Tensor:
        """Return what `mlp_function` does, and keep ``tensors``, its input and parameters."""
        ctx.bias, ctx.activation = bias, activation
        ctx.save_for_backward(*tensors)
        return mlp_function(bias, activation, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return ``(None, None, *gradients)``, those of ``tensors``. The forward pass is computed once more."""
        tensors = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            output = mlp_function(ctx.bias, ctx.activation, *tensors)
        return (None, None, *torch.autograd.grad(output, tensors, grad_output))


def mlp_function(bias: int, activation: int, input: Tensor, *parameters: Tensor) -> Tensor:
    """Compute an MLP.

    Args:
        bias: 1 where there are biases among the parameters, else 0.
        activation: What follows each layer: 0 for nothing, 1 for ReLU, 2 for the sigmoid.
        input: Shape ``(*, n)``.
        *parameters: All weights, of shape ``(outputs, inputs)``, then all biases, of shape ``(outputs,)``.

    Returns:
        The last layer's output, shape ``(*, outputs)``.

    Raises:
        UsageError: An unknown activation, or biases that do not match the weights in number.
    """
    if activation not in range(len(_ACTIVATIONS)):
        raise UsageError(f"mlp_function: activation={activation!r}; choose 0 for none, 1 for relu or 2 for sigmoid")
    if bias and len(parameters) % 2:
        raise UsageError(f"mlp_function: bias={bias!r} needs as many biases as weights, not {len(parameters)} in all")
    weights = parameters[: len(parameters) // 2] if bias else parameters
    biases: Sequence[Tensor | None] = parameters[len(weights) :] if bias else [None] * len(weights)
    follow: Callable[[Tensor], Tensor] = (torch.nn.Identity(), torch.relu, torch.sigmoid)[activation]
    output = input
    for weight, offset in zip(weights, biases, strict=True):
        output = follow(F.linear(output, weight, offset))
    return output
