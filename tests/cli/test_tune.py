"""`autoamp tune`: what it refuses, how it runs a program, and one tuning from end to end."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from autoamp.cli import main
from autoamp.cli.searches import ProgramRuns, seconds_of
from autoamp.core import CastPolicy, load_table
from autoamp.tools.tuning import Proposal, Stopped

ON_CPU = ["--dtype", "fp16", "--device-type", "cpu"]

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


def test_budgets() -> None:
    assert [seconds_of(text) for text in ("60s", "1.5m", "2h", "45")] == [60, 90, 7200, 45]


OUTER = """
import torch, autoamp
class Outer(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight).dtype
in_half = Outer(2, 2)(torch.ones(1, 2, requires_grad=True)) is torch.float16
autoamp.report_metric("found", int(torch.randint(10, 1000, (1,))) + in_half * 1000)
print("found: 9")
"""


def test_a_run_has_its_lists_its_seed_and_its_metric(runs_of: Callable[..., ProgramRuns], forked: None) -> None:
    runs = runs_of(OUTER, metric="found")
    in_fp32, in_half = runs.run(None, 0), runs.run((), 0)
    assert in_fp32.failed is in_half.failed is None
    assert in_fp32.metric < 1000
    assert in_half.metric == in_fp32.metric + 1000
    assert in_half.seconds > 0
    other = runs.run((Proposal("linear", "fp32", "unsafe", ""),), 1)
    assert other.metric < 1000
    assert other.metric != in_fp32.metric
    # A class of the script itself.
    assert runs.run((Proposal("__main__.Outer", "fp32", "unsafe", "", of_module=True),), 0).metric == in_fp32.metric


def test_a_run_that_fails_says_why(runs_of: Callable[..., ProgramRuns]) -> None:
    found = runs_of("print('loss: 0.25')\nraise ValueError('no data')\n").run((), 0)
    assert (found.metric, found.failed) == (0.25, "exit code 1: ValueError: no data")


def test_a_run_ends_when_the_budget_is_spent(runs_of: Callable[..., ProgramRuns]) -> None:
    runs = runs_of("import time\ntime.sleep(600)\n", budget=0.5)
    start = time.monotonic()
    with pytest.raises(Stopped, match="the budget was spent"):
        runs.run(None, 0)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('loss: 0.5 train_acc=0.25, at 3:30')", "no metric 'accuracy' in fp32; .*; it prints loss, train_acc"),
        ("print('accuracy: nan')", "is nan or inf in fp32"),
        ("raise ValueError('no data')", "the program fails in fp32: exit code 1: ValueError: no data"),
    ],
)
def test_a_run_in_fp32_must_tell_a_metric(
    text: str, message: str, runs_of: Callable[..., ProgramRuns], forked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        runs_of(text, metric="accuracy").run(None, 0)
    assert ended.value.code == 1
    assert re.search(f"{message}.* Nothing was written", capsys.readouterr().err)


def test_from_end_to_end(script: Path, forked: None) -> None:
    script.write_text(SCRIPT)
    arguments = [*ON_CPU, "--budget", "60s", "--seeds", "1", "--survey-steps", "2"]
    # A program gets the "--" among its arguments.
    assert main(["tune", "--metric", "loss", *arguments, "script.py", "--", "own"]) == 0
    rule = load_table(None, environ={}).policy_of("__mul__")
    assert rule is not None
    assert (rule.policy, Path(rule.origin.path).name) == (CastPolicy.FP32, "autoamp.toml")
    text = Path("autoamp.toml").read_text()
    assert "overflow in float16 at script.py:8" in text
    assert "half precision" in text
    assert "# float16 on cpu" in text
    assert json.dumps("__mul__") in text


@pytest.mark.parametrize("project", ["../autoamp.toml", "pyproject.toml"])
def test_a_tuned_list_means_the_same_alone(
    project: str, script: Path, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It extends what the runs used: a list of the environment, and that of the project, in a parent folder or here."""
    # The parent folder of `script` is that of other tests too.
    inner = script.parent / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    head = "[tool.autoamp]" if project == "pyproject.toml" else "schema = 1"
    Path(project).write_text(f'{head}\nfp32 = ["tanh"]\n')
    Path("more.toml").write_text('schema = 1\nfp32 = ["sin"]\n')
    monkeypatch.setenv("AUTOAMP_LISTS", "more.toml")
    Path("script.py").write_text(SCRIPT)
    arguments = [*ON_CPU, "--budget", "60s", "--seeds", "1", "--survey-steps", "2"]
    assert main(["tune", "--metric", "loss", *arguments, "script.py"]) == 0
    assert tomllib.loads(Path("autoamp.toml").read_text())["extends"] == ["default", project, "more.toml"]
    table = load_table(None, environ={})
    for op in ("__mul__", "tanh", "sin", "softmax"):
        rule = table.policy_of(op)
        assert rule is not None
        assert rule.policy is CastPolicy.FP32


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the program ends the command that started it")
@pytest.mark.parametrize(
    ("number", "how", "lists"),
    [(signal.SIGTERM, "terminated", []), (signal.SIGINT, "interrupted", ["bf16"])],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_signal_writes_the_best_so_far_and_leaves_nothing_behind(
    number: signal.Signals, how: str, lists: list[str], script: Path, forked: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    # Its second run is the first after the survey.
    kill = f"import os\nos.path.exists('ran') and os.kill(os.getppid(), {int(number)})\nopen('ran', 'w').close()\n"
    script.write_text(kill + SCRIPT)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    named = [word for name in lists for word in ("--lists", name)]
    arguments = [*ON_CPU, *named, "--seeds", "1", "--survey-steps", "2", "script.py"]
    assert main(["tune", "--metric", "loss", *arguments]) == 128 + number
    assert list(temporary.iterdir()) == []
    text = Path("autoamp.toml").read_text()
    assert tomllib.loads(text)["extends"] == lists or ["default"]
    assert tomllib.loads(text)["fp32"] == ["__mul__", "__rmul__", "mul", "multiply"]
    assert f"stopped early: it was {how}" in text
    assert f"stopped early: it was {how}" in capsys.readouterr().err
