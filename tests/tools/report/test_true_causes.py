"""What a report blames is what changes the step, and what it has not looked for it does not deny."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.tools import failures, step_recorder

STEPS = 5


def reported(
    make: Callable[[], nn.Module], batch: Callable[[], tuple[Tensor, Tensor]], lr: float = 1e-2, lists: Any = None
) -> tuple[dict[str, Any], list[float]]:
    """Train in fp16 as `autoamp run --report` does; returns the report, and the losses."""
    torch.manual_seed(0)
    model, losses = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with autoamp.init(
        device_type="cpu",
        dtype=torch.float16,
        scope="modules",
        trace_overflow=True,
        lists=lists,
        loss_scale=autoamp.DynamicLossScaler(64.0),
    ) as handle:
        handle.auto_scale()
        handle.record()
        for _ in range(STEPS):
            x, y = batch()
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y) if y.dtype is torch.int64 else F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return handle.report(), losses


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = 3000.0 * x
        # Inf in fp16, which the clamp makes what it is in fp32.
        return (h * h).clamp(max=1.0)


class Angles(nn.Module):
    """Angles of up to 12,000 in half, beside an overflow that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.g, self.gate = nn.Linear(1, 32), nn.Linear(64, 64), Gate()
        self.b, self.c = nn.Linear(64, 16), nn.Linear(16, 1)
        with torch.no_grad():
            self.scale.weight.copy_(torch.linspace(0.1, 3, 32)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        angle = self.scale(x)
        features = torch.cat([angle.sin(), angle.cos()], -1)
        return self.c(torch.relu(self.b(features * self.gate(self.g(features)))))


def positions() -> tuple[Tensor, Tensor]:
    at = torch.randint(0, 4000, (64, 1)).float()
    return at, (at * 0.3).sin()


def test_an_overflow_that_changes_nothing_is_not_blamed_for_what_rounds() -> None:
    found, _ = reported(Angles, positions, lr=1e-4)
    assert found["samples"]["compared"] > 0
    assert found["faults"] == []
    assert failures(found, "overflow") == []
    (remedy,) = [one for one in found["remedies"] if one["policy"] == "modules"]
    healed, _ = reported(Angles, positions, lr=1e-4, lists={"modules": {remedy["op"]: "fp32"}})
    assert healed["remedies"] == []


class Reciprocal(nn.Module):
    """Makes half tensors of what is too large for them, which become 0 again."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.a, self.c, self.b, self.lines = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1), lines
        with torch.no_grad():
            self.a.bias.fill_(3.0)
            self.c.bias.fill_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        h, k = self.a(x), self.c(x)
        v = (h.float() * 1e5).half()
        w = (k.float() * 1e5).half()
        return self.b(1e5 / v.float() + (1e5 / w.float() if self.lines == 2 else 0.0))


@pytest.mark.parametrize("lines", [1, 2])
def test_a_half_tensor_that_overflows_is_blamed_although_no_entry_cures_it(lines: int) -> None:
    found, _ = reported(lambda: Reciprocal(lines), lambda: (torch.randn(16, 8), torch.zeros(16, 1)), lr=1e-6)
    assert [one["overflow"]["op"] for one in found["faults"]] == ["half"]
    assert failures(found, "overflow")


class Scaled(nn.Module):
    """The mean of squares is inf in fp16, by which all becomes 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt()


class Divided(nn.Module):
    """Divides by the sum of what became 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(32, 64), Scaled(), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.n(self.a(x))
        return self.b(z / z.abs().sum(-1, keepdim=True))


def large() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 32) * 800, torch.randint(4, (16,))


def test_the_overflow_before_a_division_by_zero_is_named_with_an_entry_that_heals() -> None:
    found, _ = reported(Divided, large)
    (group,) = found["skips"]["groups"]
    assert group["count"] == STEPS
    assert group["overflow"]["op"] == "mul"
    entries = [one["op"] for one in found["remedies"]]
    assert entries == ["__mul__", "__rmul__"]
    healed, losses = reported(Divided, large, lists={"fp32": entries})
    assert healed["skips"]["total"] == 0
    plain = reported(Divided, large, lists={"extends": []})[1]
    torch.testing.assert_close(losses, plain, atol=0.0, rtol=1e-3)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i, self.h = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        z = (self.i(x) + self.h(h)) * 300
        return z / ((z * z).sum(-1, keepdim=True) + 1e-6).sqrt()


def test_a_run_of_which_no_step_was_compared_is_not_said_to_have_no_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recorder, "_MAX_CALLS", 4)
    torch.manual_seed(0)
    cell, head = Cell(), nn.Linear(16, 4)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], 1e-3)
    with autoamp.init(device_type="cpu", dtype=torch.float16, scope="modules", trace_overflow=True) as handle:
        handle.auto_scale()
        handle.record()
        for _ in range(2):
            h = torch.zeros(4, 16)
            for _ in range(6):
                h = cell(torch.randn(4, 8), h)
            optimizer.zero_grad()
            F.cross_entropy(head(h), torch.randint(4, (4,))).backward()
            optimizer.step()
        verdict = handle.report()["verdict"]
    assert "were not looked for (the step has more than 4 calls of models)" in verdict["sentence"]
    assert verdict["level"] == "unclear"


def test_a_step_that_is_not_recorded_unasked_is_told_with_the_option(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    caplog.set_level(logging.WARNING)
    with autoamp.init(device_type="cpu", dtype=torch.float16, scope="modules") as handle:
        handle.auto_scale()
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(3):
                (model(torch.full((2, 4), 1e6)).square().mean()).backward()
            optimizer.step()
    assert handle.skipped_steps == 3
    assert "init(trace_overflow=True), or autoamp run --trace-overflow" in caplog.text
    assert "more than 2 calls of one model" in caplog.text
