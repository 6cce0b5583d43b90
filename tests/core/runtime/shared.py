"""What the tests of this folder share: a handle that is quickly in place, and a small training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.core import Handle, original_of

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32

# Enough to tell casts from none, and quickly in place.
LISTS: dict[str, Any] = {"extends": [], "fp16": ["linear", "matmul"], "fp32": ["softmax", "exp"]}
SETTINGS: dict[str, Any] = {"lists": LISTS, "device_type": "cpu", "dtype": HALF, "rebind": False}


def init(**changes: Any) -> Handle:
    handle = autoamp.init(**{**SETTINGS, **changes})
    assert isinstance(handle, Handle)
    return handle


def region(**changes: Any) -> autoamp.Region:
    return autoamp.region(**{**SETTINGS, **changes})


def ones(dtype: torch.dtype = FULL) -> Tensor:
    return torch.ones(2, 2, dtype=dtype)


def runs_in() -> torch.dtype:
    """The dtype that a listed op runs in, here and now."""
    return F.linear(ones(), ones()).dtype


def patched() -> bool:
    return original_of(F.linear) is not F.linear


def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, and return what it returned or raise what it raised."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(60)


class Training:
    """A linear model, its optimizer, and a loss whose gradients are `factor` times those of the plain one."""

    def __init__(self, make: Callable[..., Any] = torch.optim.SGD) -> None:
        self.model = nn.Linear(4, 2)
        self.optimizer = make(self.model.parameters(), lr=0.01)
        self.inputs = torch.ones(3, 4)

    def loss(self, factor: float = 1.0) -> Tensor:
        loss: Tensor = self.model(self.inputs).float().pow(2).mean() * factor
        return loss


def steps(handle: Any, training: Training, *factors: float) -> None:
    for factor in factors:
        with handle.scale_loss(training.loss(factor), training.optimizer) as scaled:
            scaled.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
