"""`autoamp bisect`: a whole program, and what it says where there is nothing to find."""

from __future__ import annotations

import argparse
import math
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from autoamp.cli import program_runs
from autoamp.tuning import Outcome, Proposal, Survey
from autoamp_command import main
from tests.cli.test_tune import runs_of, script  # noqa: F401 - a fixture
from tests.tuning.planted import survey, use

ON_CPU = ["--metric", "loss", "--dtype", "fp16", "--device-type", "cpu"]

# Its second layer is wrong by 20 in fp16.
SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
model[1].register_forward_hook(lambda m, args, out: out + 20 if out.dtype == torch.float16 else out)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(16, 4)
loss = (model(x).float() - x).abs().mean()
loss.backward()
optimizer.step()
print("loss:", loss.item())
"""


def test_from_end_to_end(script: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    script.write_text(SCRIPT)
    assert main(["bisect", *ON_CPU, "--survey-steps", "1", "script.py"]) == 0
    found = capsys.readouterr()
    assert tomllib.loads(found.out)["modules"] == {"1": "fp32"}
    assert "linear at script.py" in found.out
    for line in ("loss in fp32: ", "loss in half precision: ", "loss with these entries: ", " runs", "override(model)"):
        assert line in found.out
        assert line in found.err


def test_entries_of_paths_act_also_where_the_program_does_not_ask_for_them(script: Path, tmp_path: Path) -> None:  # noqa: F811
    script.write_text(SCRIPT)
    runs = runs_of(tmp_path / "runs", 300.0, script)
    fp32 = runs.run(None, 0).metric
    entries = [(Proposal(name, "fp32", "culprit", "", of_module=True),) for name in ("1", "0")]
    restored, wrong = (runs.run(entry, 0).metric for entry in entries)
    assert restored == pytest.approx(fp32, rel=0.01)
    assert abs(wrong - fp32) > 0.1


class _Planted:
    """Stands for `ProgramRuns`: `of_fp32` and `of_half` are what each run tells."""

    of_fp32: Any = Outcome(1.0)
    of_half: Any = Outcome(1.0)
    printed: tuple[str, ...] = ("accuracy",)

    def __init__(self, chosen: argparse.Namespace, folder: Path, deadline: float) -> None:
        self.made = 0

    def survey(self, seconds: float, *, timed: bool) -> Survey:
        return survey(use("conv2d", "fp16", 9, 90))

    def run(self, candidate: tuple[Proposal, ...] | None, seed: int) -> Outcome:
        self.made += 1
        return self.of_fp32 if candidate is None else self.of_half


@pytest.mark.parametrize(
    ("fp32", "half", "code", "message"),
    [
        (Outcome(1.0), Outcome(1.01), 0, "no rule has to change"),
        (Outcome(1.0), Outcome(math.nan), 1, "differs even with every surveyed"),
        (Outcome(None), Outcome(1.0), 1, "in fp32; name a value that it prints"),
        (Outcome(math.inf), Outcome(1.0), 1, "is nan or inf in fp32;"),
        (Outcome(failed="exit code 1: no data"), Outcome(1.0), 1, "fails in fp32"),
    ],
)
def test_where_there_is_nothing_to_find_it_prints_no_list(
    fp32: Outcome, half: Outcome, code: int, message: str, script: Path, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(program_runs, "ProgramRuns", _Planted)
    monkeypatch.setattr(_Planted, "of_fp32", fp32)
    monkeypatch.setattr(_Planted, "of_half", half)
    assert main(["bisect", "--metric", "loss", "--dtype", "fp16", "script.py"]) == code
    found = capsys.readouterr()
    assert message in found.err
    assert found.out == ""


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["missing.py"], "", "can't open file"),
        (["--budget", "soon", "script.py"], "", "not a time"),
        (["--tolerance", "-1", "script.py"], "", "--tolerance"),
        (["script.py"], "raise ValueError('no data')", "cannot be surveyed: exit code 1: ValueError: no data"),
    ],
)
def test_what_it_refuses(
    arguments: list[str], text: str, message: str, script: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:  # fmt: skip
    script.write_text(text)
    assert main(["bisect", *ON_CPU, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM ends a process at once there")
def test_sigterm_ends_the_program_and_tells_what_is_known(script: Path, tmp_path: Path) -> None:  # noqa: F811
    script.write_text("import pathlib, time\npathlib.Path('waits').touch()\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "autoamp", "bisect", *ON_CPU, "script.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bisecting:
        try:
            end = time.monotonic() + 120
            while not Path("waits").exists() and bisecting.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            bisecting.terminate()
            out, errors = bisecting.communicate(timeout=60)
        finally:
            bisecting.kill()
    assert (bisecting.returncode, out) == (128 + signal.SIGTERM, ""), errors
    assert "interrupted during the survey" in errors
