"""What the tests of this folder share: a network, its training, and `initialize()` with short lists."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autoamp
from autoamp.apex.levels import LEVELS
from autoamp.core import runtime_of

LISTS = {"extends": [], "fp16": ["linear", "conv2d"], "fp32": ["cross_entropy", "softmax"]}
ALL_LEVELS = sorted(LEVELS)


def initialize(models: Any, optimizers: Any = None, **kwargs: Any) -> Any:
    defaults = {"dtype": torch.float16, "device_type": "cpu", "lists": LISTS, "verbosity": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return autoamp.initialize(models, optimizers, **{**defaults, **kwargs})


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 1, 8, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    inputs, labels = batch()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).float(), labels)
        with autoamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) and one[k].dtype == other[k].dtype for k in one
    )


def scalers() -> list[Any]:
    return runtime_of(autoamp.current_handle()).optimizers.scalers  # type: ignore[union-attr]
