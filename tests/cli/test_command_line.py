"""The options of the command `autoamp`, which come without torch."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autoamp
from autoamp.cli import command, main
from autoamp.cli.options import DTYPES
from autoamp.levels import LEVELS
from autoamp.runtime import Handle, current_handle
from tests.launches import environment

# Runs the entry point of the command, and tells whether that took torch.
PROBE = """
import sys
from autoamp.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
print(code, "torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--help"], 0, "usage: autoamp [-h] [--version] command ..."),
        ([], 0, "usage: autoamp [-h] [--version] command ..."),
        (["run", "--help"], 0, "usage: autoamp run [options] script.py args..."),
        (["lists", "-h"], 0, "usage: autoamp lists"),
        (["--version"], 0, f"autoamp {autoamp.__version__} (torch {torch.__version__}"),
        (["nothing"], 2, ""),
    ],
)
def test_help_and_version_come_without_torch(argv: list[str], code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *argv], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.splitlines()[-1] == f"{code} False"
    assert said in done.stdout


def test_choices_are_those_that_the_commands_take() -> None:
    assert set(command.DTYPES) == set(DTYPES)
    assert tuple(LEVELS) == command.LEVELS


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_lists_tell_the_reason_and_the_installed_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = 'schema = 1\nfp32 = [\n    "matmul",  # sums of squares\n]\n[modules]\n"*.head" = "fp32"  # logits\n'
    (place / "autoamp.toml").write_text(text, encoding="utf-8")
    assert main(["lists", "matmul", "--dtype", "fp16", "--device-type", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("matmul: fp32 (its arguments are cast to fp32), by 'matmul' in ")
    assert f"{place / 'autoamp.toml'}:3; sums of squares\n" in out
    assert main(["lists", "layer_norm", "--dtype", "bf16", "--device-type", "cpu"]) == 0
    asked = capsys.readouterr().out
    found = re.fullmatch(r"layer_norm: none \(left alone\), by 'layer_norm' in (.+):(\d+); (.+)\n", asked)
    assert found is not None, asked
    line = Path(found[1]).read_text(encoding="utf-8").splitlines()[int(found[2]) - 1]
    assert (Path(found[1]).name, Path(found[1]).is_absolute()) == ("bf16.toml", True)
    assert '"layer_norm"' in line
    assert line.endswith(found[3])
    assert main(["lists", "einsum", "--dtype", "bf16", "--device-type", "cpu"]) == 0
    assert "; promotes where it contracts nothing\n" in capsys.readouterr().out
    # One that is asked for is as it is among all.
    assert main(["lists", "--dtype", "bf16", "--device-type", "cpu"]) == 0
    whole = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["layer_norm", "none", f"lists/bf16.toml:{found[2]}"] in whole


def test_all_rules_are_shown_but_names_that_compute_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = 'schema = 1\n[modules]\n"*.head" = "fp32"  # logits\n'
    (place / "autoamp.toml").write_text(text, encoding="utf-8")
    policies = {}
    for dtype in ("fp16", "bf16"):
        assert main(["lists", "--dtype", dtype, "--device-type", "cpu"]) == 0
        shown = capsys.readouterr().out.splitlines()
        policies[dtype] = dict(line.split()[:2] for line in shown[: shown.index("[modules]")] if line)
        assert not {"Optional", "__dir__"} & policies[dtype].keys()
        headed = shown[shown.index("[modules]") :][:2]
        assert headed == ["[modules]", f"*.head  fp32  {place / 'autoamp.toml'}:3"]
    assert (policies["fp16"]["layer_norm"], policies["bf16"]["layer_norm"]) == ("fp32", "none")


def test_doctor_names_a_broken_list_and_tells_the_rest(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "autoamp.toml").write_text('schema = 1\nfp32 = ["sofmax"]\n', encoding="utf-8")
    assert main(["doctor", "--quick", "--device-type", "cpu"]) == 1
    out = capsys.readouterr().out
    headings = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert headings == ["Packages", "Device", "Lists"]
    said = "".join(out.split())
    assert f"{place / 'autoamp.toml'}:2:unknownop'sofmax'" in said
    assert "didyoumean'softmax'" in said


def test_doctor_shows_rules_on_modules(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "autoamp.toml").write_text('schema = 1\n[modules]\n"*.head" = "fp32"\n', encoding="utf-8")
    assert main(["doctor", "--quick", "--device-type", "cpu"]) == 0
    assert f"[modules]      *.head: fp32 ({place / 'autoamp.toml'}:3)" in capsys.readouterr().out


_MODEL = """
import torch

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) if torch.is_grad_enabled() or not self.apart else x.sum(1, dtype=torch.float64)

def make(apart=False):
    net = Net(4, 4)
    net.apart = apart
    return net, torch.ones(2, 4)

def make_apart():
    return make(True)

def make_failing():
    net, x = make(True)
    return net, x[0]

def make_alone():
    return make()[0]
"""


@pytest.mark.parametrize(
    ("name", "code", "first"),
    [
        ("make", 0, "the same"),
        ("make_apart", 1, "output: float64, "),
        ("make_failing", 4, "not compared: IndexError: Dimension out of range"),
    ],
)
def test_doctor_compares_the_paths_of_a_model(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, code: int,
    first: str,
) -> None:  # fmt: skip
    (place / f"of_{name}.py").write_text(_MODEL, encoding="utf-8")
    monkeypatch.syspath_prepend(str(place))
    # The default compiles C++.
    monkeypatch.setattr(Handle, "consistency", functools.partialmethod(Handle.consistency, backend=None))
    asked = f"of_{name}:{name}"
    assert main(["doctor", "--quick", "--device-type", "cpu", "--consistency", asked]) == code
    told = capsys.readouterr().out.partition(f"Consistency of {asked}\n")[2].splitlines()
    assert told[0].startswith(f"  no_grad: {first}")
    assert len([line for line in told if line]) == 7
    assert current_handle() is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:make", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("of_errors:missing", "has no attribute 'missing'"),
        ("of_errors:make_alone", "expected a tuple of a model and its inputs, got a Net"),
    ],
)
def test_doctor_says_what_is_wrong_with_the_function(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (place / "of_errors.py").write_text(_MODEL, encoding="utf-8")
    monkeypatch.syspath_prepend(str(place))
    assert main(["doctor", "--quick", "--device-type", "cpu", "--consistency", name]) == 2
    said = capsys.readouterr().err
    assert f"--consistency {name}: " in said
    assert message in said
