"""Options of `autoamp run` that look at a program: it ends bit for bit as without them, and its code runs once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launches import launched, written

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")

COMMON = """
import sys, numpy, torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
CALLS, LOSSES = [], []

def train(model, loss_of, steps=8):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(steps):
        x = torch.randn(6, 4)
        if step in (2, 5):
            x = x * 1e30
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        LOSSES.append(loss.detach().float())

def end(*values):
    torch.save((LOSSES, [torch.as_tensor(value) for value in values], torch.get_rng_state()), sys.argv[1])
    assert len(CALLS) == 8, len(CALLS)
"""

PROGRAMS = {
    # As MoCo: an encoder outside of the model follows it, and a queue of its outputs is a global.
    "momentum": """
encoder, teacher = nn.Linear(4, 8), nn.Linear(4, 8)
teacher.requires_grad_(False)
queue = torch.zeros(12, 8)
def loss_of(x):
    CALLS.append(1)
    with torch.no_grad():
        for own, other in zip(encoder.parameters(), teacher.parameters()):
            other.data.mul_(0.9).add_(own.data.nan_to_num(), alpha=0.1)
        queue[:-6] = queue[6:].clone()
        queue[-6:] = teacher(x).float().nan_to_num()
    return (encoder(x).float() - queue[-6:]).square().mean()
train(encoder, loss_of)
end(*encoder.parameters(), *teacher.parameters(), queue)
""",
    # As a VQ-VAE: a codebook without gradient is written in forward, by `.data`, and counts are a numpy array.
    "codebook": """
class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 4)
        self.book = nn.Parameter(torch.randn(5, 8), requires_grad=False)
        self.counts = numpy.zeros(5)
    def forward(self, x):
        CALLS.append(1)
        h = self.inner(x)
        near = torch.cdist(h.float(), self.book).argmin(1)
        for place in near.tolist():
            self.counts[place] += 1
        self.book.data[near[0]] = 0.9 * self.book.data[near[0]] + 0.1 * h[0].detach().float().nan_to_num()
        return self.outer(h * h + self.book[near])
model = Quantizer()
train(model, lambda x: F.mse_loss(model(x).float(), x))
end(*model.parameters(), model.counts)
""",
    # Spectral norm by hand: a buffer that forward replaces, and a counter that the next call uses.
    "counter": """
class Norm(nn.Module):
    calls = 0
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("u", torch.randn(4))
    def forward(self, x):
        CALLS.append(1)
        Norm.calls += 1
        with torch.no_grad():
            v = F.normalize(self.weight.nan_to_num().t() @ self.u, dim=0)
            self.u = F.normalize(self.weight.nan_to_num() @ v, dim=0)
        return x @ (self.weight / (self.u @ self.weight @ v)) * (1 + 0.1 * Norm.calls)
model = Norm()
train(model, lambda x: model(x).float().exp().mean())
end(model.weight, model.u, Norm.calls)
""",
}
OPTIONS = {
    "no option": [],
    "trace": ["--trace-overflow"],
    "fail on": ["--fail-on", "overflow"],
    "report": ["--report", "report.json"],
    "capsule": ["--capsule", "capsules"],
}


def flat(end: Any) -> list[Tensor]:
    losses, values, random = end
    return [*losses, *values, random]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_ends_bit_for_bit_as_without_the_option(program: str, dtype: str, tmp_path: Path) -> None:
    written(tmp_path, {"program.py": COMMON + PROGRAMS[program]})
    common = ["run", "--quiet", "--device-type", "cpu", "--dtype", dtype, "--on-nonfinite", "skip"]
    runs = {name: [*common, *given, "program.py", f"{place}.pt"] for place, (name, given) in enumerate(OPTIONS.items())}
    ended = launched(tmp_path, runs)
    for name, run in ended.items():
        # The overflows of these programs are the data's.
        assert run.code in (0, 3), (name, run.err)
    ends = [torch.load(tmp_path / f"{place}.pt") for place in range(len(OPTIONS))]
    for name, end in zip(OPTIONS, ends, strict=True):
        for found, expected in zip(flat(end), flat(ends[0]), strict=True):
            assert torch.equal(found.nan_to_num(), expected.nan_to_num()), name
