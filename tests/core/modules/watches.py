"""Modules that note the dtypes they see, and a handle with a short list, for the tests of several files here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autoamp

HALF, FP32 = torch.float16, torch.float32
LISTS: dict[str, Any] = {"extends": [], "fp16": ["linear", "mm"], "fp32": ["softmax", "exp"]}


def start(modules: dict[str, str] | None = None, **settings: Any) -> autoamp.Handle:
    handle = autoamp.init(device_type="cpu", dtype=HALF, lists={**LISTS, "modules": modules or {}}, **settings)
    assert isinstance(handle, autoamp.Handle)
    return handle


class Calls(nn.Module):
    """A module whose call is that of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Watch(nn.Module):
    """A linear layer that notes the dtypes which come in, go through and, in backward, come back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []
        self.returned: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.seen = [x.dtype, y.dtype]
        if y.requires_grad:
            y.register_hook(lambda gradient: self.returned.append(gradient.dtype))
        return y


class Other(Watch):
    pass


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Watch()
        self.middle = nn.Sequential(Watch(), Watch())
        self.last = Watch()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def watches(model: Outer) -> list[Watch]:
    return [model.first, model.middle[0], model.middle[1], model.last]


def computed(model: Outer) -> list[torch.dtype]:
    model(torch.randn(2, 4))
    return [watch.seen[1] for watch in watches(model)]


def marks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if any("autoamp" in name for name in vars(module))]
