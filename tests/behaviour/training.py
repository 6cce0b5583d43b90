"""A small training in fp16 on the CPU, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import autoamp


def started(**settings: Any) -> autoamp.Handle:
    """Start autoamp in fp16 on the CPU, at a scale of 1024 at first."""
    settings.setdefault("loss_scale", autoamp.DynamicLossScaler(1024.0))
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, **settings)
    assert isinstance(handle, autoamp.Handle)
    return handle


def step(model: Any, optimizer: Any, factor: float = 1.0) -> None:
    """Take a step of a model with four inputs and its optimizer after `initialize`, by the mean of its squares."""
    optimizer.zero_grad()
    with autoamp.scale_loss(model(torch.rand(8, 4)).float().square().mean() * factor, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


class Training:
    """A linear layer of ones, its optimizer, and steps of both.

    Args:
        handle: Scales the losses.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def loss(self) -> Tensor:
        """The sum of the outputs, in fp32; its gradient is 1 for each weight."""
        return self.model(torch.ones(1, 4)).float().sum()  # type: ignore[no-any-return]

    def backward(self, factor: float = 1.0, **how: Any) -> None:
        """Add the gradient of a loss, which is ``factor`` for each weight; 1e39 overflows."""
        with self.handle.scale_loss(self.loss() * factor, self.optimizer, **how) as scaled_loss:
            scaled_loss.backward()

    def step(self, factor: float = 1.0) -> None:
        """Take a whole step."""
        self.optimizer.zero_grad()
        self.backward(factor)
        self.optimizer.step()

    @property
    def weight(self) -> float:
        """The first weight: all are equal."""
        return float(self.model.weight.detach()[0, 0])

    @property
    def grad(self) -> float:
        """The first element of the gradient."""
        assert self.model.weight.grad is not None
        return float(self.model.weight.grad[0, 0])


OVERFLOW = 1e39
