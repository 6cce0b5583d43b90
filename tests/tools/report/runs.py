"""Runs to report on: small ones that train, and one of many call sites that is made up."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

import autoamp

EVIL = "</script><script>window.injected = 1</script><!--"


class Gate(nn.Module):
    """Overflows in fp16 where its input does."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        square = y * y
        return square / (1.0 + square)


def train(steps: int, *, faults: tuple[int, ...] = (), **options: Any) -> tuple[Any, list[Tensor]]:
    """Train in fp16, with large values at some steps; return the handle, recorded, and the weights after it."""
    torch.manual_seed(0)
    recorded = options.pop("record", True)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), Gate(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=True, **options)
    if recorded:
        handle.record()
    for step in range(steps):
        model[1].weight.data.fill_(1.0e4 if step in faults else 1.0)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).float().square().mean()
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return handle, [parameter.detach().clone() for parameter in model.parameters()]


def train_linear(handle: Any, factor: float = 1.0, steps: int = 2, *, scales: bool = True) -> None:
    """Train one layer; the loss is the sum of its outputs, times a factor."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().sum() * factor
        with handle.scale_loss(loss, optimizer) if scales else contextlib.nullcontext(loss) as scaled:
            scaled.backward()
        optimizer.step()


def many(document: dict[str, Any], rows: int = 10_000) -> dict[str, Any]:
    """Return a report with so many call sites, one of whose names would be markup."""
    grown = copy.deepcopy(document)
    row = grown["trace"]["rows"][0]
    grown["trace"]["rows"] = [
        {**row, "op": f"torch.op{number}", "module": f"layers.{number}", "calls": number, "bytes_cast": 7 * number}
        for number in range(rows)
    ]
    grown["trace"]["rows"][0] |= {"op": EVIL, "module": EVIL}
    grown["skips"]["groups"][0]["sentence"] = EVIL
    grown["remedies"][0] |= {"op": EVIL, "evidence": EVIL + "\x07\u2028"}
    grown["program"] = [EVIL]
    return grown
