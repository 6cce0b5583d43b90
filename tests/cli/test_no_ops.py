"""What `autoamp run` says of a program that trains and casts nothing, and of one whose optimizer is gone at its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launches import Ended, launched, written

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")

PROGRAM = """
import sys, torch
from torch import nn
kind = sys.argv[1]
model = nn.Linear(4, 4)
class Exact(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.layer(x)
def train(model, forward, x=torch.ones(2, 4)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        optimizer.step()
if kind == "switch":
    with torch.autocast("cpu", enabled=False):
        train(model, model)
elif kind == "region":
    model = Exact()
    train(model, model)
elif kind == "evaluates":
    with torch.no_grad(), torch.autocast("cpu"):
        model(torch.ones(2, 4))
    with torch.autocast("cpu", enabled=False):
        train(model, model)
elif kind == "functions":
    train(model, lambda x: x @ model.weight)
elif kind == "unlisted":
    train(nn.Embedding(4, 4), lambda x: model.bias * 2)
elif kind == "doubles":
    model = nn.Embedding(4, 4).double()
    train(model, model, torch.ones(2, dtype=torch.long))
elif kind == "compiled":
    train(model, torch.compile(model, backend="eager"))
"""
MASTERS = """
import sys, torch
from apex import amp
def main():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=sys.argv[1], verbosity=0)
    for _ in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(4, 8)).float().mean() / 64, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
main()
"""
REASONS = {
    "switch": "ops 3 bfloat16; ",
    "region": "ops 0 (torch.autocast(enabled=False) at program.py:11 turns casts off); ",
    "evaluates": "ops 0 (torch.autocast(enabled=False) at program.py:28 turns casts off); ",
    "functions": "ops 0 (no module with parameters was called before the step at program.py:18); ",
    "unlisted": "ops 0 (no module with parameters was called before the step at program.py:18); ",
    "doubles": "ops 0 (the step at program.py:18 is of parameters in float64 on cpu, and float32 on cpu is cast); ",
    "compiled": "ops 0 (compiled code is not counted); ",
}
RUN = ["run", "--device-type", "cpu", "--dtype", "bf16"]
RUNS = {
    **{kind: [*RUN, "program.py", kind] for kind in REASONS},
    **{level: [*RUN, "masters.py", level] for level in ("O2", "O3")},
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Every command line."""
    folder: Path = tmp_path_factory.mktemp("programs")
    return launched(written(folder, {"program.py": PROGRAM, "masters.py": MASTERS}), RUNS)


@pytest.mark.parametrize("kind", REASONS)
def test_a_summary_without_ops_gives_the_reason_and_its_line(kind: str, ended: dict[str, Ended]) -> None:
    assert ended[kind].code == 0, ended[kind].err
    assert REASONS[kind] in ended[kind].err


@pytest.mark.parametrize(("level", "masters"), [("O2", "with fp32 masters"), ("O3", "without masters")])
def test_masters_are_told_of_a_model_that_is_gone_at_the_end(level: str, masters: str, ended: dict[str, Ended]) -> None:
    assert ended[level].code == 0, ended[level].err
    assert f"parameters 72 bfloat16, {masters}; " in ended[level].err
