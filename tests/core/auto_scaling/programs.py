"""A small model, its gradients, and handles that cast nothing, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# No op is cast, so gradients must be bitwise those of plain torch.
NO_CASTS: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16, "lists": {"extends": []}}


def make() -> tuple[nn.Sequential, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(5, 4)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def train_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other
