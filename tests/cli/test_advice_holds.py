"""What `autoamp run --trace-overflow` prints as tried holds in an `autoamp.toml` beside the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launches import forks, launched, written

pytestmark = forks

PROGRAM = """
import torch
from torch import nn
class Mask(nn.Module):
    def forward(self, h):
        return h * (torch.arange(len(h)) > 0)[:, None]
class Planted(nn.Module):
    def forward(self, h):
        return {formula}
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), {mask}Planted(), nn.Linear(8, 4))
nn.init.eye_(net[0].weight)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
x = {data}
for _ in range(2):
    optimizer.zero_grad()
    net(x).float().square().mean().backward()
    optimizer.step()
"""
# By name: a formula that is finite in fp32.
FORMULAS = {
    "square": "h * ((x := h * 1000.0) * x) / ((x * x).mean(-1, keepdim=True) + 1.0)",
    "norm_of_zeros": "((r := h.relu()) - r.mean(-1, True)) / (r.std(-1, keepdim=True, unbiased=False) + 1e-8)",
    "einsum": "h + torch.einsum('bi,bi->b', x := h.abs() * 1000, x)[:, None] * 1e-6",
    "scores": "h + ((x := h * 1000.0) @ x.T * 1e-6).softmax(-1) @ h",
    "root": "h + torch.atan2(torch.sqrt(h * h + 1e-9), h.abs() + 1e-9)",
    # No entry of functions heals this: two gradients cancel each other.
    "steep": "h.square().sub(h.square().amax(-1, keepdim=True)).exp() * h",
}
RUN = ["run", "--device-type", "cpu", "--dtype", "fp16", "--loss-scale", "2", "--trace-overflow", "train.py"]


@pytest.mark.parametrize("name", FORMULAS)
def test_the_printed_entry_heals_the_next_run(name: str, tmp_path: Path) -> None:
    texts = {"formula": FORMULAS[name], "mask": "Mask(), ", "data": "torch.randn(4, 8)"}
    if name == "steep":
        texts |= {"mask": "", "data": "300.0 + torch.rand(4, 8) * 100.0"}
    text = PROGRAM
    for part, value in texts.items():
        text = text.replace(f"{{{part}}}", value)
    written(tmp_path, {"train.py": text})
    before = launched(tmp_path, {"run": RUN})["run"]
    assert before.code == 0, before.err
    assert "2 of 2 steps skipped" in before.err
    (entry,) = re.findall(r"add (.*? = .*?)( under \[modules\])? to the list file \(tried\)", before.err)
    assert bool(entry[1]) == (name == "steep"), before.err
    table = "[modules]\n" if entry[1] else ""
    written(tmp_path, {"autoamp.toml": f"schema = 1\n{table}{entry[0]}\n"})
    after = launched(tmp_path, {"run": RUN})["run"]
    assert after.code == 0, after.err
    assert "0 of 2 steps skipped" in after.err
    assert "overflowed" not in after.err
