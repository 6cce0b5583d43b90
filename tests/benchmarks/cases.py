"""What is timed: small workloads, and the three ways to run each of them.

Tensors are small, so that the time of a call is mostly that of everything around the kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp

DEVICE = "cpu"
# Linear layers of the model by which parameter weights are timed, and the size of everything.
LAYERS, WIDTH, ROWS = 8, 16, 4

Workload = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One workload. ``calls`` of the op that is timed make up one call of it.

    Attributes:
        name: What the table shows.
        make: Makes the workload, given the half dtype. Made once, run in every way.
        calls: How many calls of the op one run of the workload stands for.
        scoped: Whether torch.autocast is entered anew in each run, as around a forward pass.
    """

    name: str
    make: Callable[[torch.dtype], Workload]
    calls: int = 1
    scoped: bool = False


@contextlib.contextmanager
def patched(dtype: torch.dtype) -> Iterator[autoamp.Handle | autoamp.NoOpHandle]:
    """Run with autoamp's own lists in place."""
    handle = autoamp.init(device_type=DEVICE, dtype=dtype, rebind=False)
    try:
        yield handle
    finally:
        handle.deactivate()


def autocast(dtype: torch.dtype) -> torch.autocast:
    """Run under torch.autocast."""
    return torch.autocast(DEVICE, dtype=dtype)


def in_scope(workload: Workload, dtype: torch.dtype) -> Workload:
    """Return a workload that enters torch.autocast each time."""

    def run() -> Any:
        with torch.autocast(DEVICE, dtype=dtype):
            return workload()

    return run


def _linear(args_of: Callable[[Tensor, torch.dtype], Tensor]) -> Callable[[torch.dtype], Workload]:
    def make(dtype: torch.dtype) -> Workload:
        x, w, b = (args_of(t, dtype) for t in (torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)))
        return lambda: F.linear(x, w, b)

    return make


def _matmul(args_of: Callable[[Tensor, torch.dtype], Tensor]) -> Callable[[torch.dtype], Workload]:
    def make(dtype: torch.dtype) -> Workload:
        x, w = args_of(torch.randn(ROWS, WIDTH), dtype), args_of(torch.randn(WIDTH, WIDTH), dtype)
        return lambda: torch.matmul(x, w)

    return make


def _operator(dtype: torch.dtype) -> Workload:
    x, w = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(WIDTH, WIDTH).to(dtype)
    return lambda: x @ w


def _rowwise(name: str, args_of: Callable[[Tensor, torch.dtype], Tensor]) -> Callable[[torch.dtype], Workload]:
    def make(dtype: torch.dtype) -> Workload:
        x = args_of(torch.randn(ROWS, WIDTH), dtype)
        return lambda: getattr(torch, name)(x, -1)

    return make


def _mse_loss(dtype: torch.dtype) -> Workload:
    x, y = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(ROWS, WIDTH).to(dtype)
    return lambda: F.mse_loss(x, y)


def _relu(dtype: torch.dtype) -> Workload:
    x = torch.randn(ROWS, WIDTH).to(dtype)
    return lambda: torch.relu(x)


class _MatmulByWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.matmul(x, weight)
        return x


def _weights(make_model: Callable[[], nn.Module]) -> Callable[[torch.dtype], Workload]:
    def make(dtype: torch.dtype) -> Workload:
        model, x = make_model(), torch.randn(ROWS, WIDTH)
        return lambda: model(x)

    return make


def _layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _shared_layer() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*(layer for _ in range(LAYERS)))


def _half(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype)


def _full(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor


CASES = (
    Case("linear, half already", _linear(_half)),
    Case("linear, three casts", _linear(_full)),
    Case("linear, weights of 8 layers", _weights(_layers), LAYERS, scoped=True),
    Case("linear, one layer 8 times", _weights(_shared_layer), LAYERS, scoped=True),
    Case("matmul, half already", _matmul(_half)),
    Case("operator @, half already", _operator),
    Case("matmul, two casts", _matmul(_full)),
    Case("matmul, 8 weights", _weights(_MatmulByWeights), LAYERS, scoped=True),
    Case("softmax, fp32 already", _rowwise("softmax", _full)),
    Case("softmax, one cast", _rowwise("softmax", _half)),
    # torch's CPU autocast lists these two as fp32, and softmax not at all.
    Case("prod, one cast", _rowwise("prod", _half)),
    Case("mse_loss, two casts", _mse_loss),
    Case("relu, unlisted", _relu),
)
"""The cost of one call."""


class TrainingStep:
    """A step of a small classifier: forward, loss, scaled backward, optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.inputs, self.classes = torch.randn(32, 64), torch.randint(0, 10, (32,))

    def loss(self) -> Tensor:
        """Return the loss of the batch."""
        return F.cross_entropy(self.model(self.inputs), self.classes)

    def plain(self) -> Workload:
        """Step in fp32."""

        def run() -> None:
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()

        return run

    def with_autocast(self, dtype: torch.dtype) -> Workload:
        """Step with torch.autocast and torch.amp.GradScaler."""
        scaler: Any = torch.amp.GradScaler(DEVICE, init_scale=128.0)

        def run() -> None:
            self.optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=dtype):
                loss = self.loss()
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()

        return run

    def with_handle(self, handle: Any) -> Workload:
        """Step with `handle.scale_loss`."""

        def run() -> None:
            self.optimizer.zero_grad()
            with handle.scale_loss(self.loss(), self.optimizer) as scaled:
                scaled.backward()
            self.optimizer.step()

        return run
