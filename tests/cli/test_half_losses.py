"""`autoamp run` with `--report` or `--fail-on` tells what half precision loses without an inf, and without them not.

They do so also where casts are left to the program.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.launches import Ended, launched, written

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")

PROGRAM = """
import sys, torch
from torch import nn
dtype, lr = getattr(torch, sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
nn.init.ones_(model[1].bias)
layers = [*model[0].parameters(), *model[2].parameters()]
optimizer = torch.optim.SGD([{"params": layers, "lr": 0.01}, {"params": model[1].parameters()}], lr=lr)
x = torch.randn(16, 8, dtype=dtype)
for _ in range(20):
    optimizer.zero_grad()
    model(x).float().sum().backward()
    optimizer.step()
if "loads" in sys.argv:
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {4: {"momentum_buffer": torch.full((8,), 1 / 3)}}})
print(sum(param.double().sum().item() for param in model.parameters()))
"""

RUN = ["run", "--device-type", "cpu"]
# A rate of 1e-6 makes updates that round away beside weights of 1, in both half dtypes.
RUNS = {
    **{half: [*RUN, "--report", f"{half}.json", "program.py", half, "1e-6"] for half in ("bfloat16", "float16")},
    "unasked": [*RUN, "program.py", "bfloat16", "1e-6"],
    "judged": [*RUN, "--fail-on", "skip", "program.py", "bfloat16", "1e-6"],
    "plain": ["python", "program.py", "bfloat16", "1e-6"],
    "O0": [*RUN, "--report", "O0.json", "--opt-level", "O0", "program.py", "bfloat16", "1e-6", "loads"],
    "moves": [*RUN, "--report", "moves.json", "program.py", "bfloat16", "0.02"],
    "fp32": [*RUN, "--report", "fp32.json", "program.py", "float32", "1e-6", "loads"],
    "json": [*RUN, "--quiet", "--report", "run.json", "program.py", "bfloat16", "1e-6"],
    "page": [*RUN, "--quiet", "--report", "run.html", "program.py", "bfloat16", "1e-6"],
    "quiet": [*RUN, "--quiet", "program.py", "bfloat16", "1e-6"],
}
LOST = "autoamp: updates lost in 2 of 6 parameters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs run."""
    return written(tmp_path_factory.mktemp("programs"), {"program.py": PROGRAM})


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """Every command line."""
    return launched(folder, RUNS)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_a_half_program_is_told_by_the_last_line_and_a_warning(half: str, ended: dict[str, Ended]) -> None:
    *_, first, last, written_to = ended[half].err.splitlines()
    assert written_to == f"autoamp: report written to {half}.json"
    assert f"casts left to the program, which has Sequential in {half}" in first
    assert last.startswith(f"{LOST} (see docs/")
    (told,) = [line for line in ended[half].err.splitlines() if "UserWarning: " in line]
    assert "program.py:14: UserWarning: step 4 of SGD changed no bit of 100.0% of the elements" in told
    assert "as in Sequential.1.weight, Sequential.1.bias. Keep fp32 master weights" in told


def test_the_program_computes_the_same(ended: dict[str, Ended]) -> None:
    assert ended["plain"].code == 0, ended["plain"].err
    assert ended["bfloat16"].out == ended["plain"].out == ended["json"].out


def test_it_needs_no_handle(ended: dict[str, Ended]) -> None:
    assert ended["O0"].code == 0, ended["O0"].err
    assert "rounded momentum_buffer of Sequential.1.weight from float32 to bfloat16" in ended["O0"].err
    assert ended["O0"].err.splitlines()[-2].startswith(f"{LOST}; optimizer state rounded (see docs/")


def test_fail_on_tells_it_too(ended: dict[str, Ended]) -> None:
    assert LOST in ended["judged"].err
    assert "UserWarning: step 4 of SGD changed no bit" in ended["judged"].err


@pytest.mark.parametrize("name", ["moves", "fp32", "quiet", "unasked"])
def test_clean_and_quiet_programs_have_no_line_and_none_has_one_unasked(name: str, ended: dict[str, Ended]) -> None:
    assert ended[name].code == 0, ended[name].err
    assert "UserWarning" not in ended[name].err
    assert " lost" not in ended[name].err


def test_the_report_has_a_row(ended: dict[str, Ended], folder: Path) -> None:
    assert ended["json"].code == 0, ended["json"].err
    document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert (document["lost_params"], document["half_params"]) == (2, 6)
    (row,) = document["half_losses"]
    assert (row["kind"], row["optimizer"], row["group"], row["step"]) == ("updates", "SGD", 1, 16)
    assert document["verdict"]["level"] == "bad"
    assert row["sentence"] in document["verdict"]["sentence"]
    # The page is of JSON and of the words that people read.
    assert (folder / "run.html").read_text(encoding="utf-8").count("an update below 1/512 of a weight rounds away") > 1
