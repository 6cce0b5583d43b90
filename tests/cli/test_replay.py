"""`autoamp run --capsule` and `autoamp replay`: the step of a run, run again in another folder with nothing else."""

from __future__ import annotations

import json
import logging
import os
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import autoamp
from autoamp_command import main
from tests.launches import launched

# Each fault is in the step 3, but for that of the loss.
SCRIPT = """
import sys, torch
import helper
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)
        self.step, self.fault = 0, sys.argv[1]
    def forward(self, x):
        hidden = self.drop(self.first(x))
        if self.step == 3:
            hidden = getattr(helper, self.fault, lambda x: x)(hidden)
        return self.last(hidden)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
data = torch.randn(100_000, 4)
for model.step in range(5):
    x = data[8 * model.step : 8 * model.step + 8]
    if model.step == 3 and sys.argv[1] == "data":
        x = x.clone()
        x[5] = torch.nan
    loss = model(x).mean()
    if model.step == 3 and sys.argv[1] == "loss":
        loss = (loss * 0).log()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
HELPER = """
import torch
def forward(x):
    return (x * 300) * (x * 400)
class Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad / torch.zeros_like(grad)
def backward(x):
    return Divided.apply(x)
"""
RUN = ["run", "--quiet", "--device-type", "cpu", "--dtype", "fp16", "--loss-scale", "16", "--capsule", "capsules"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text(HELPER)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")
@pytest.mark.parametrize(
    ("fault", "dtype", "scale", "named"),
    [
        ("forward", "fp16", "16", "mul in module Net at helper.py:4 made inf"),
        ("backward", "fp16", "16", "the backward pass of Divided"),
        ("data", "fp16", "16", "the input x of Net holds nan at batch index 5"),
        ("backward", "bf16", "1", "the backward pass of Divided"),
    ],
)
def test_a_step_is_run_again_with_nothing_but_its_file(
    fault: str, dtype: str, scale: str, named: str, script: Path
) -> None:
    run = launched(script.parent, {"run": [*RUN, "--dtype", dtype, "--loss-scale", scale, script.name, fault]})["run"]
    assert run.code == 0, run.err
    (file,) = (script.parent / "capsules").iterdir()
    assert f"writing {file}, 0." in run.err
    assert named in run.err
    # Of the 100,000 rows of data the 8 of the step.
    assert file.stat().st_size < 400_000
    elsewhere = script.parent / "elsewhere"
    elsewhere.mkdir()
    moved = file.rename(elsewhere / file.name)
    script.unlink()
    (script.parent / "helper.py").unlink()
    again = launched(elsewhere, {"replay": ["replay", moved.name]})["replay"]
    assert again.code == 0, again.err
    assert named.replace("helper.py", str(script.parent / "helper.py")) in again.err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")
def test_a_fault_outside_of_modules_makes_no_capsule(script: Path) -> None:
    run = launched(script.parent, {"run": [*RUN, script.name, "loss"]})["run"]
    assert run.code == 0, run.err
    assert "step 3 overflowed at loss scale" in run.err
    assert list((script.parent / "capsules").iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")
def test_a_program_whose_own_handle_has_no_folder_is_warned(tmp_path: Path) -> None:
    own = "import autoamp, torch\nautoamp.init(device_type='cpu', dtype=torch.float16, scope='modules', {})\n"
    (tmp_path / "without.py").write_text(own.format("loss_scale=2.0"))
    (tmp_path / "with.py").write_text(own.format("capsule='own'"))
    (tmp_path / "plain.py").write_text("import torch\n")
    runs = launched(tmp_path, {name: [*RUN, f"{name}.py"] for name in ("without", "with", "plain")})
    assert [run.code for run in runs.values()] == [0, 0, 0]
    assert "--capsule capsules has no effect from here on: expected init(capsule='capsules')" in runs["without"].err
    assert "without.py:2" in runs["without"].err
    assert "has no effect" not in runs["with"].err + runs["plain"].err


class Overflowing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 300 * 400)


def train(capsule: Path, model: nn.Module, fp32: str = "") -> None:
    """Take one step that is skipped, with one module in fp32 where its path is given."""
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=16.0, capsule=capsule)
    if fp32:
        handle.override(model.get_submodule(fp32), "fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with handle.scale_loss(model(torch.ones(2, 4, dtype=torch.float16)).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert handle.last_step_skipped
    handle.deactivate()


def test_in_code_and_a_finding_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Lost, its precision would let the first module overflow.
    train(tmp_path, nn.Sequential(Overflowing(4, 4), Overflowing(4, 1)), fp32="0")
    (file,) = tmp_path.iterdir()
    with zipfile.ZipFile(file) as archive:
        # All but the step is read without running anything.
        found, step = json.loads(archive.read("finding.json")), archive.read("step.pt")

    def write() -> None:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("finding.json", json.dumps(found))
            archive.writestr("step.pt", step)

    assert found["overflow"]["op"] == "linear"
    assert main(["replay", str(file)]) == 0
    found["overflow"]["op"] = "exp"
    write()
    assert main(["replay", str(file)]) == 1
    assert "op: exp in the run, linear here" in capsys.readouterr().err
    found["versions"]["Python"] = "3.1.4"
    write()
    assert main(["replay", str(file)]) == 2
    assert "has code of Python 3.1.4" in capsys.readouterr().err


def test_a_capsule_of_an_earlier_run_stays(tmp_path: Path) -> None:
    train(tmp_path, Overflowing(4, 1))
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    train(tmp_path, Overflowing(4, 1))
    assert file.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_model_that_cannot_be_pickled_trains_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Overflowing(4, 1)
    model.lock = threading.Lock()
    with caplog.at_level(logging.WARNING, "autoamp"):
        train(tmp_path, model)
    assert "no capsule of step 0: " in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, text = tmp_path / "model.pt", tmp_path / "text"
    torch.save({"weight": torch.ones(2)}, other)
    text.write_text("hello")
    for path, message in ((other, "no capsule"), (text, "no capsule"), (tmp_path / "missing", "cannot read")):
        assert main(["replay", str(path)]) == 2
        assert message in capsys.readouterr().err
    assert main([*RUN[:-1], str(text), __file__]) == 2
    assert "expected a folder" in capsys.readouterr().err
    assert main([*RUN, "--opt-level", "O2", __file__]) == 2
    assert "expected --opt-level O1" in capsys.readouterr().err
    assert autoamp.runtime.current_handle() is None
