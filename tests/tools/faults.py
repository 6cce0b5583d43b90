"""A model with a place for a fault, functions that overflow, and steps of them, for the tests of this folder."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import autoamp
from autoamp.tools import Overflow


class Net(nn.Module):
    """Two layers with a hook for a fault between them, and dropout, which draws random numbers."""

    def __init__(self, fault: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.faulty = Faulty(fault)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.faulty(self.drop(self.norm(self.first(x)))))
        return out


class Faulty(nn.Module):
    """Calls a function."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, h: Tensor) -> Tensor:
        return self.fault(h)


def mean_square(out: Tensor) -> Tensor:
    return out.float().pow(2).mean()


def thousandfold(out: Tensor) -> Tensor:
    return (out.float() * 1000.0).sum()


def started(scale: Any = 256.0, *, traced: bool = True, **settings: Any) -> Any:
    """Return a handle that casts to fp16 on the CPU."""
    return autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=scale, trace_overflow=traced, **settings)


def take_step(
    handle: Any,
    net: Callable[[Tensor], Tensor],
    optimizer: Any,
    loss: Callable[[Tensor], Tensor] = mean_square,
    x: Tensor | None = None,
) -> None:
    optimizer.zero_grad()
    with handle.scale_loss(loss(net(torch.randn(5, 4) if x is None else x)), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def train(
    net: nn.Module,
    *,
    scale: Any = 256.0,
    steps: int = 1,
    loss: Callable[[Tensor], Tensor] = mean_square,
    data: Callable[[Tensor, int], Tensor] = lambda x, step: x,
    **settings: Any,
) -> autoamp.Handle:
    handle: autoamp.Handle = started(scale, **settings)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        x = data(torch.randn(5, 4, generator=generator), step)
        take_step(handle, net, optimizer, loss, x)
    return handle


def found_in(handle: autoamp.Handle) -> Overflow:
    found = handle.last_overflow
    assert found is not None
    values = found.to_dict()
    assert values["kind"] == found.kind
    assert json.loads(json.dumps(values)) == values
    return found


def found_by(
    net: nn.Module, on_demand: bool, loss: Callable[[Tensor], Tensor] = mean_square, scale: float = 256.0
) -> Overflow:
    """Return what is found in a skipped step, or by `explain_overflow`."""
    if not on_demand:
        return found_in(train(net, scale=scale, loss=loss))
    handle = started(scale, traced=False)
    found: Overflow | None = handle.explain_overflow(lambda: loss(net(torch.randn(5, 4))))
    handle.deactivate()
    assert found is not None
    return found


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    number = next(number for number, line in enumerate(lines, start=first) if text in line)
    return f"{os.path.relpath(str(inspect.getsourcefile(function)))}:{number}"


def squared(h: Tensor) -> Tensor:
    big = h.half() * 1000.0
    return big * big


def root_of_zero(h: Tensor) -> Tensor:
    return h.mul(0).sqrt()


def overflowing_in_fp32(h: Tensor) -> Tensor:
    return h.float() * 1e30 * 1e30


class SteepInHalf(torch.autograd.Function):
    """Its backward pass makes inf in half precision alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient.half() + 1.0) * 60000.0 * 60000.0


class Fault(NamedTuple):
    """A function of activations that overflows, and what is to be found."""

    function: Callable[[Tensor], Tensor]
    verdict: type
    op: str | None
    line: str | None
    phase: str = "forward"
    in_cast: bool = False
    scale: float = 256.0
    loss: Callable[[Tensor], Tensor] = mean_square


BIG_TIMES_BIG = line_of(squared, "big * big")


def modes() -> int:
    """Return how many modes of any kind intercept calls."""
    return len(_get_current_dispatch_mode_stack()) + len(_get_current_function_mode_stack())
