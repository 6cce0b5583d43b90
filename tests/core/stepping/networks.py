"""A small network, its losses and steps with master weights, for tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import autoamp


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def o2(model: nn.Module, *optimizers: Any, **kwargs: Any) -> None:
    defaults = {"dtype": torch.float16, "device_type": "cpu", "verbosity": 0, "opt_level": "O2", "loss_scale": 8.0}
    autoamp.initialize(model, list(optimizers), **{**defaults, **kwargs})


def sgd(params: Any, **kwargs: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **kwargs})


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    inputs, targets = data(seed)
    return mse_loss(model(inputs), targets)


def backward(model: nn.Module, optimizer: Any, seed: int = 0, factor: float = 1.0) -> None:
    with autoamp.scale_loss(loss_of(model, seed) * factor, optimizer) as scaled:
        scaled.backward()


def masters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def grads(optimizer: Any) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in masters(optimizer)]


def snapshot(model: nn.Module, optimizer: Any) -> list[Tensor]:
    state = [v.clone() for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *masters(optimizer))] + state


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )
