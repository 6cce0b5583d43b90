"""`autoamp tune`: what it refuses, how it runs a program, and one tuning from end to end."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from autoamp import UsageError
from autoamp.cli import program_runs
from autoamp.cli.program_runs import ProgramRuns, seconds_of
from autoamp.rules import CastPolicy, load_table
from autoamp.tuning import Outcome, OutOfBudget, Proposal, Survey
from autoamp_command import main
from tests.tuning.planted import Program, survey, use

# Its loss is nan in fp16, as 300 * 400 overflows, and tells by which lists it runs.
SCRIPT = """
import os, sys, torch
class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
    def forward(self, x):
        return (x * 300.0) * (x * 400.0 * self.scale) / 120000.0
model = Gate()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.linspace(-3, 3, 64).view(16, 4)
for _ in range(6):
    loss = torch.nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert "own" not in sys.argv or sys.argv[1] == "--"
print("loss:", loss.item())
"""


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("1.5m", 90), ("2h", 7200), ("45", 45)])
def test_budgets(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "soon", "-3s", "5d"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(UsageError, match="not a time"):
        seconds_of(text)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # A child finds the checkout, as the tests do.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_it_refuses_what_it_cannot_do(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*args: str) -> str:
        assert main(["tune", "--metric", "loss", *args]) == 2
        return capsys.readouterr().err

    assert "can't open file" in refusal("missing.py")
    assert "not a time" in refusal("--budget", "soon", "script.py")
    assert "directory that exists" in refusal("-o", "none/list.toml", "script.py")
    assert "--seeds" in refusal("--seeds", "0", "script.py")
    Path("autoamp.toml").write_text("schema = 1\n")
    assert "move it away" in refusal("script.py")


def runs_of(folder: Path, seconds: float, program: Path, **options: Any) -> Any:
    chosen = argparse.Namespace(
        **{
            "metric": "loss", "dtype": "fp16", "device_type": "cpu", "lists": [], "is_module": False, "seed": 0,
            "survey_steps": 1, "program": str(program), "args": [], **options,
        }
    )  # fmt: skip
    folder.mkdir()
    return ProgramRuns(chosen, folder, time.monotonic() + seconds)


def test_a_run_has_its_lists_its_seed_and_its_metric(script: Path, tmp_path: Path) -> None:
    script.write_text(
        "import torch, autoamp\n"
        "class Outer(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.linear(x, torch.ones(2, 2)).dtype\n"
        "number = int(torch.randint(10, 1000, (1,)))\n"
        "in_half = Outer()(torch.ones(1, 2, requires_grad=True)) is torch.float16\n"
        "autoamp.report_metric('found', number + in_half * 1000)\n"
        "print('found: 9')\n"
    )
    runs = runs_of(tmp_path / "runs", 300.0, script, metric="found")
    in_fp32, in_half = runs.run(None, 0), runs.run((), 0)
    assert in_fp32.failed is in_half.failed is None
    assert in_fp32.metric < 1000
    assert in_half.metric == in_fp32.metric + 1000
    assert in_half.seconds > 0
    other = runs.run((Proposal("linear", "fp32", "unsafe", ""),), 1)
    assert other.metric < 1000
    assert other.metric != in_fp32.metric


def test_a_run_has_the_modules_of_its_list_also_those_of_the_script(script: Path, tmp_path: Path) -> None:
    script.write_text(
        "import torch\n"
        "class Outer(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.linear(x, torch.ones(2, 2)).dtype\n"
        "loss = 1.0 + (Outer()(torch.ones(1, 2, requires_grad=True)) is torch.float16)\n"
    )
    runs = runs_of(tmp_path / "runs", 300.0, script)
    listed = runs.run((Proposal("__main__.Outer", "fp32", "unsafe", "", of_module=True),), 0)
    assert (listed.failed, listed.metric) == (None, 1.0)
    assert runs.run((), 0).metric == 2.0


def test_a_run_that_fails_says_why_and_one_without_time_is_not_made(script: Path, tmp_path: Path) -> None:
    script.write_text("loss = 0.25\nraise ValueError('no data')\n")
    found = runs_of(tmp_path / "runs", 300.0, script).run(None, 0)
    assert (found.metric, found.failed) == (0.25, "exit code 1: ValueError: no data")
    script.write_text("import time\ntime.sleep(600)\n")
    start = time.monotonic()
    with pytest.raises(OutOfBudget):
        runs_of(tmp_path / "more", 0.5, script).run(None, 0)
    assert time.monotonic() - start < 60


class _Planted:
    """Stands for `ProgramRuns`: a program that behaves by its table, interrupted at a run."""

    interrupted_at = 99

    printed: tuple[str, ...] = ()

    def __init__(self, chosen: argparse.Namespace, folder: Path, deadline: float) -> None:
        self.program = Program(self.survey(0))

    def survey(self, seconds: float) -> Survey:
        return survey(
            use("hypot", "unlisted", 1, 1, overflow=5), use("conv2d", "fp16", 9, 90), use("softmax", "fp32", 9, 3)
        )

    def run(self, candidate: tuple[Proposal, ...] | None, seed: int) -> Outcome:
        if len(self.program.runs) == self.interrupted_at:
            raise KeyboardInterrupt
        return self.program(candidate, seed)


def test_the_list_is_written_with_figures_and_ctrl_c_keeps_the_best(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program_runs, "ProgramRuns", _Planted)
    assert main(["tune", "--metric", "loss", "-o", "one.toml", "script.py"]) == 0
    table = load_table("one.toml", environ={})
    policies = {name: rule.policy for name in ("hypot", "conv2d", "softmax") if (rule := table.policy_of(name))}
    assert policies == {"hypot": CastPolicy.FP32, "conv2d": CastPolicy.NONE, "softmax": CastPolicy.FP16}
    assert "unsafe: 5 of its arguments and results overflow" in Path("one.toml").read_text()
    assert "# float16 on cpu" in Path("one.toml").read_text()
    monkeypatch.setattr(_Planted, "interrupted_at", 3)
    assert main(["tune", "--metric", "loss", "-o", "two.toml", "--lists", "bf16", "script.py"]) == 130
    text = Path("two.toml").read_text()
    assert "stopped early: it was interrupted" in text
    assert "not tried: conv2d" in text
    assert 'extends = ["bf16"]' in text
    assert '"hypot",  # unsafe' in text
    assert "interrupted" in capsys.readouterr().err


def test_two_unsafe_ops_of_one_class_are_one_entry(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = [
        use(op, "fp16", 100, 50, module_class=name, overflow=3 if name == "net.Head" else 0)
        for op in ("bmm", "conv1d") for name in ("net.Head", "net.Body")
    ]  # fmt: skip
    monkeypatch.setattr(_Planted, "survey", lambda self, seconds: survey(*ops))
    monkeypatch.setattr(program_runs, "ProgramRuns", _Planted)
    assert main(["tune", "--metric", "loss", "script.py"]) == 0
    text = Path("autoamp.toml").read_text()
    assert tomllib.loads(text)["modules"] == {"net.Head": "fp32"}
    assert "bmm is unsafe in this class" in text
    assert "conv1d is unsafe in this class" in text


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome(None, 1.0), "the program reported no metric 'accuracy' in fp32"),
        (Outcome(math.nan, 1.0), "is nan or inf in fp32"),
        (Outcome(failed="exit code 1: no data"), "the program fails in fp32: exit code 1: no data"),
    ],
)
def test_where_nothing_is_known_in_fp32_nothing_is_written(
    outcome: Outcome, message: str, script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Planted, "run", lambda self, candidate, seed: outcome)
    monkeypatch.setattr(program_runs, "ProgramRuns", _Planted)
    assert main(["tune", "--metric", "accuracy", "script.py"]) == 1
    errors = capsys.readouterr().err
    assert message in errors
    assert "Nothing was written" in errors
    assert not Path("autoamp.toml").exists()


def test_a_metric_that_is_not_there_is_told_with_those_that_are(script: Path, tmp_path: Path) -> None:
    script.write_text("print('loss: 0.5 train_acc=0.25, at 3:30')\n")
    runs = runs_of(tmp_path / "runs", 300.0, script, metric="accuracy")
    assert runs.run(None, 0).metric is None
    assert runs.printed == ["loss", "train_acc"]


def test_from_end_to_end(script: Path) -> None:
    arguments = ["--dtype", "fp16", "--device-type", "cpu", "--budget", "60s", "--seeds", "1", "--survey-steps", "2"]
    # A program gets the "--" among its arguments.
    assert main(["tune", "--metric", "loss", *arguments, "script.py", "--", "own"]) == 0
    rule = load_table(None, environ={}).policy_of("__mul__")
    assert rule is not None
    assert (rule.policy, Path(rule.origin.path).name) == (CastPolicy.FP32, "autoamp.toml")
    text = Path("autoamp.toml").read_text()
    assert "overflow in float16 at script.py:8" in text
    assert "half precision" in text
    assert json.dumps("__mul__") in text


# Its second run, which is the first after the survey, does not end by itself.
WAITS = """
import pathlib, time
with open("runs", "a") as file:
    file.write("run ")
if pathlib.Path("runs").read_text() == "run run ":
    pathlib.Path("waits").touch()
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM ends a process at once there")
def test_sigterm_writes_the_best_so_far_and_leaves_nothing_behind(script: Path, tmp_path: Path) -> None:
    script.write_text(WAITS + SCRIPT)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    arguments = ["--dtype", "fp16", "--device-type", "cpu", "--seeds", "1", "--survey-steps", "2", "script.py"]
    command = [sys.executable, "-m", "autoamp", "tune", "--metric", "loss", *arguments]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as tuning:
        try:
            end = time.monotonic() + 120
            while not Path("waits").exists() and tuning.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            tuning.terminate()
            _, errors = tuning.communicate(timeout=60)
        finally:
            tuning.kill()
    assert tuning.returncode == 128 + signal.SIGTERM, errors
    assert list(temporary.iterdir()) == []
    rule = load_table("autoamp.toml", environ={}).policy_of("__mul__")
    assert rule is not None
    assert rule.policy is CastPolicy.FP32
    assert "stopped early: it was terminated" in Path("autoamp.toml").read_text()
