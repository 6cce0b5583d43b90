"""`autoamp run --report`, `--fail-on`, and `autoamp report`."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.launches import Ended, launched, written

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks"),
    pytest.mark.skipif(
        importlib.util.find_spec("jinja2") is None,
        reason="the extra report is absent",
    ),
]

FAULTY = """
import sys, torch
class Square(torch.nn.Module):
    def forward(self, x):
        square = x * x
        return square / (1 + square)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), Square(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if "apex" in sys.argv:
    from apex import amp
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=64.0)
for step in range(4):
    x = torch.randn(4, 8)
    if (step == 2 and "fault" in sys.argv) or (step == 3 and "twice" in sys.argv) or "always" in sys.argv:
        x *= 3e3
    optimizer.zero_grad()
    loss = model(x).float().square().mean() / 64
    if "apex" in sys.argv:
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    else:
        loss.backward()
    optimizer.step()
sys.exit(5 if "fails" in sys.argv else 0)
"""

RUN = ["run", "--quiet", "--device-type", "cpu", "--dtype", "fp16"]
RUNS = {
    "page": [*RUN, "--report", "page.html", "faulty.py"],
    "bad": [*RUN, "--report", "bad.json", "--fail-on", "overflow", "faulty.py", "fault"],
    "good": [*RUN, "--report", "good.json", "--fail-on", "skip", "faulty.py"],
    "own code": [*RUN, "--fail-on", "overflow", "faulty.py", "fault", "fails"],
    "apex": [*RUN, "--report", "apex.json", "--fail-on", "overflow", "faulty.py", "fault", "apex"],
    "unasked": ["run", "--device-type", "cpu", "--dtype", "fp16", "faulty.py", "fault"],
    "unasked twice": ["run", "--device-type", "cpu", "--dtype", "fp16", "faulty.py", "fault", "twice"],
    "again": ["run", "--device-type", "cpu", "--dtype", "fp16", "--trace-overflow", "faulty.py", "always"],
    "page of json": ["report", "bad.json", "-o", "bad.html", "--fail-on", "overflow"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("reports"), {"faulty.py": FAULTY})


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    return launched(folder, RUNS)


def test_a_page_is_written(folder: Path, ended: dict[str, Ended]) -> None:
    assert ended["page"].code == 0, ended["page"].err
    assert "steps skipped" in (folder / "page.html").read_text(encoding="utf-8")


def test_a_fault_ends_with_code_3(folder: Path, ended: dict[str, Ended]) -> None:
    assert ended["bad"].code == 3, ended["bad"].err
    assert "1 of kind half-precision op: step 2 overflowed" in ended["bad"].err
    found = json.loads((folder / "bad.json").read_text(encoding="utf-8"))
    assert found["exit_code"] == 3
    assert [one["op"] for one in found["remedies"]] == ["__mul__", "__rmul__"]
    assert found["skips"]["groups"][0]["overflow"]["location"].endswith("faulty.py:5")
    assert found["timeline"]["steps"] == 4


def test_a_good_run_ends_well(folder: Path, ended: dict[str, Ended]) -> None:
    assert ended["good"].code == 0, ended["good"].err
    found = json.loads((folder / "good.json").read_text(encoding="utf-8"))
    assert found["verdict"]["level"] == "good"
    assert found["functions"]["torch.nn.functional.linear"] == {"float16": 8}


def test_a_program_of_apex_is_traced_too(folder: Path, ended: dict[str, Ended]) -> None:
    assert ended["apex"].code == 3, ended["apex"].err
    found = json.loads((folder / "apex.json").read_text(encoding="utf-8"))
    assert found["opt_level"] == "O2"
    assert found["skips"]["groups"][0]["kind"] == "half_precision_op"
    assert found["skips"]["groups"][0]["overflow"]["location"].endswith("faulty.py:5")


def test_a_step_that_was_not_recorded_says_so(ended: dict[str, Ended]) -> None:
    err = ended["unasked"].err
    assert ended["unasked"].code == 0
    assert "step 2 overflowed at loss scale 65536: not located: the step was not recorded" in err


def test_the_step_after_a_skip_is_explained_without_an_option(ended: dict[str, Ended]) -> None:
    err = ended["unasked twice"].err
    assert ended["unasked twice"].code == 0
    assert "step 3 overflowed at loss scale 32768: mul in module 1 at faulty.py:5 made inf" in err
    assert 'add fp32 = ["__mul__", "__rmul__"] to the list file (tried)' in err


def test_the_same_cause_is_printed_once_and_counted(ended: dict[str, Ended]) -> None:
    err = ended["again"].err
    assert err.count("mul in module 1 at faulty.py:5") == 2
    assert err.count(", and not in fp32: in 3 more steps") == 1


def test_the_programs_own_code_stays(ended: dict[str, Ended]) -> None:
    assert ended["own code"].code == 5


def test_a_page_of_json(folder: Path, ended: dict[str, Ended]) -> None:
    assert ended["page of json"].code == 3
    assert "bad.json: 1 of kind half-precision op" in ended["page of json"].err
    assert "1 of 4 steps skipped" in (folder / "bad.html").read_text(encoding="utf-8")
