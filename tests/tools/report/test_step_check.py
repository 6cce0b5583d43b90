"""Ops that overflow in steps that are not skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp


class Unit(nn.Module):
    """Divides by a norm, which fp16 makes inf."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x * x).mean(-1, keepdim=True).sqrt()


class Masked(nn.Module):
    """An attention whose mask is -inf, written or made of a finite number, as programs do."""

    def __init__(self, by_sum: bool) -> None:
        super().__init__()
        self.project, self.by_sum = nn.Linear(8, 8), by_sum

    def forward(self, x: Tensor) -> Tensor:
        scores = self.project(x) @ x.T - 40.0
        seen = torch.ones_like(scores).tril() > 0
        if self.by_sum:
            scores = scores + (~seen).to(scores.dtype) * torch.finfo(scores.dtype).min
        else:
            scores = scores.masked_fill(~seen, float("-inf"))
        return F.softmax(scores, -1) @ x


def report_of(model: Any, x: Tensor, loss_scale: float = 64.0) -> dict[str, Any]:
    """Train in fp16, and return the report."""
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=loss_scale, trace_overflow=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    handle.record(sample=False)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x).float() * torch.arange(1.0, 9.0) - 1.0).square().mean()
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert handle.skipped_steps == 0
    found: dict[str, Any] = handle.report()
    return found


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# At a scale of 1 gradients are not checked.
@pytest.mark.parametrize("loss_scale", [64.0, 1.0])
def test_an_op_that_overflows_though_all_gradients_are_finite_is_named(loss_scale: float) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Unit())
    nn.init.eye_(model[0].weight)  # type: ignore[arg-type]
    found = report_of(model, 500.0 + torch.rand(4, 8), loss_scale=loss_scale)
    (fault,) = found["faults"]
    assert (fault["step"], fault["overflow"]["op"], fault["overflow"]["value"]) == (0, "mul", "inf")
    assert fault["remedy"].startswith('add fp32 = ["__mul__", "__rmul__"] to the list file')
    assert [(one["policy"], one["op"]) for one in found["remedies"]] == [("fp32", "__mul__"), ("fp32", "__rmul__")]
    assert found["verdict"]["level"] == "bad"
    assert found["verdict"]["sentence"].startswith("mul in module 1 at ")


@pytest.mark.parametrize("by_sum", [False, True])
def test_a_mask_of_an_attention_is_no_fault(by_sum: bool) -> None:
    assert report_of(nn.Sequential(Masked(by_sum), nn.Linear(8, 8)), torch.rand(4, 8))["faults"] == []


def test_an_overflow_without_an_effect_on_gradients_is_no_fault() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            too_large = (self.unused(x).detach() + 500.0).square()
            return self.used(x) + 1.0 / too_large

    assert report_of(Unused(), torch.rand(4, 8))["faults"] == []
