"""docs/howto/capsule.md: the step of a run, run again in another folder with nothing else."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.cli import main
from tests.launches import Ended, forks, launched, written

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
OWN = "import autoamp, torch\nautoamp.init(device_type='cpu', dtype=torch.float16, scope='modules', {})\n"
RUN = ["run", "--quiet", "--device-type", "cpu"]
FP16 = ["--dtype", "fp16", "--loss-scale", "16", "--capsule"]
RUNS = {
    **{fault: [*RUN, *FP16, fault, "script.py", fault] for fault in ("forward", "backward", "data", "loss")},
    "bf16": [*RUN, "--dtype", "bf16", "--loss-scale", "1", "--capsule", "bf16", "script.py", "backward"],
    **{name: [*RUN, *FP16, "capsules", f"{name}.py"] for name in ("without", "with", "plain")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the programs. Their sources are gone after the runs."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """Every command line of RUNS."""
    scripts = {
        "script.py": SCRIPT, "helper.py": HELPER, "plain.py": "import torch\n",
        "without.py": OWN.format("loss_scale=2.0"), "with.py": OWN.format("capsule='own'"),
    }  # fmt: skip
    found = launched(written(folder, scripts), RUNS)
    for name in scripts:
        (folder / name).unlink()
    return found


@forks
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("forward", "mul in module Net at helper.py:4 made inf"),
        ("backward", "the backward pass of Divided"),
        ("data", "the input x of Net holds nan at batch index 5"),
        ("loss", "log at script.py:26 made inf"),
        ("bf16", "the backward pass of Divided"),
    ],
)
def test_a_step_is_run_again_with_nothing_but_its_file(
    name: str, named: str, folder: Path, ended: dict[str, Ended], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended[name].code == 0, ended[name].err
    (file,) = (folder / name).iterdir()
    assert f"writing {file}, 0." in ended[name].err
    assert named in ended[name].err
    # Of the 100,000 rows of data the 8 of the step.
    assert file.stat().st_size < 400_000
    code = main(["replay", str(file.rename(tmp_path / file.name))])
    err = capsys.readouterr().err
    assert code == 0, err
    assert err.count(named) == 2


@forks
def test_a_program_whose_own_handle_has_no_folder_is_warned(ended: dict[str, Ended]) -> None:
    assert [ended[name].code for name in ("without", "with", "plain")] == [0, 0, 0]
    assert "--capsule capsules has no effect from here on: expected init(capsule='capsules')" in ended["without"].err
    assert "without.py:2" in ended["without"].err
    assert "has no effect" not in ended["with"].err + ended["plain"].err


class Overflowing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 300 * 400)


def train(capsule: Path, model: nn.Module, fp32: str = "") -> Path:
    """Take one step that is skipped, with one module in fp32 where its path is given. Returns the newest capsule."""
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=16.0, capsule=capsule)
    if fp32:
        handle.override(model.get_submodule(fp32), "fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with handle.scale_loss(model(torch.ones(2, 4, dtype=torch.float16)).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert handle.last_step_skipped
    handle.deactivate()
    return max(capsule.iterdir(), key=lambda file: file.stat().st_mtime_ns)


def rewrite(file: Path, finding: dict[str, Any], name: str, step: bytes) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("finding.json", json.dumps(finding))
        archive.writestr(name, step)


def test_replay_ends_with_1_if_it_finds_another_op_than_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Lost, its precision would let the first module overflow.
    file = train(tmp_path, nn.Sequential(Overflowing(4, 4), Overflowing(4, 1)), fp32="0")
    with zipfile.ZipFile(file) as archive:
        found, step = json.loads(archive.read("finding.json")), archive.read("tape.pt")
    assert found["overflow"]["op"] == "linear"
    assert main(["replay", str(file)]) == 0
    found["overflow"]["op"] = "exp"
    rewrite(file, found, "tape.pt", step)
    assert main(["replay", str(file)]) == 1
    assert "op: exp in the run, linear here" in capsys.readouterr().err
    found["versions"]["python"], found["text"] = "3.1.4", "\x1b[31mred"
    rewrite(file, found, "tape.pt", step)
    assert main(["replay", str(file)]) == 1
    shown = capsys.readouterr().err
    assert "the run had python 3.1.4" in shown
    assert "\\x1b[31mred" in shown
    assert "\x1b" not in shown


def test_a_capsule_of_an_earlier_run_stays(tmp_path: Path) -> None:
    file = train(tmp_path, Overflowing(4, 1))
    before = file.read_bytes()
    train(tmp_path, Overflowing(4, 1))
    assert file.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


class Stranger:
    """Writes a file as it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["step.pt", "tape.pt"])
@pytest.mark.parametrize("version", [7, 8])
def test_the_pickle_of_a_stranger_runs_nothing(
    name: str, version: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, step = train(tmp_path, Overflowing(4, 1)), io.BytesIO()
    with zipfile.ZipFile(file) as archive:
        found = json.loads(archive.read("finding.json"))
    torch.save({"events": [Stranger(tmp_path / "written")]}, step)
    rewrite(file, {**found, "format": version}, name, step.getvalue())
    assert main(["replay", str(file)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert version == 8 or "has format 7 of capsules, expected 8" in err
    assert not (tmp_path / "written").exists()


def test_files_that_are_no_capsules_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, text = tmp_path / "model.pt", tmp_path / "text"
    torch.save({"weight": torch.ones(2)}, other)
    text.write_text("hello")
    for path, message in ((other, "no capsule"), (text, "no capsule"), (tmp_path / "missing", "cannot read")):
        assert main(["replay", str(path)]) == 2
        assert message in capsys.readouterr().err
    assert main([*RUN, *FP16, str(text), __file__]) == 2
    assert f"--capsule {str(text)!r}: expected a folder" in capsys.readouterr().err
    assert main([*RUN, *FP16, "x", "--opt-level", "O2", __file__]) == 2
    assert "--capsule: expected --opt-level O1, got O2" in capsys.readouterr().err
    assert autoamp.core.current_handle() is None
