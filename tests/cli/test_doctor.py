"""`autoamp doctor`: the device, packages, lists, names that were taken before `init`, and the paths of a model."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest
import torch

import autoamp
from autoamp.cli import main
from autoamp.core import current_handle
from autoamp.tools import Handle

QUICK = ["doctor", "--quick", "--device-type", "cpu"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, whose modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def lines_of(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> list[str]:
    """Call the doctor, and return what it prints without alignment."""
    assert main([*QUICK, *options]) == code
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_lists_are_those_of_this_place(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'schema = 1\nfp32 = ["no_such_package.loss"]\n[modules]\n"*.head" = "fp32"\n'
    (place / "autoamp.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("AUTOAMP_LISTS", "apex")
    lines = lines_of(capsys)
    assert {
        "AUTOAMP_LISTS apex", f"1 rules {place / 'autoamp.toml'}", "not imported no_such_package.loss",
        f"[modules] *.head: fp32 ({place / 'autoamp.toml'}:4)",
    } < set(lines)  # fmt: skip
    assert [line for line in lines if line.endswith(" rules lists/apex.toml")]


def test_a_broken_list_is_named_and_the_rest_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "autoamp.toml").write_text('schema = 1\nfp32 = ["sofmax"]\n', encoding="utf-8")
    lines = lines_of(capsys, code=1)
    assert {"Packages", "Device", "Lists"} < set(lines)
    (told,) = [line for line in lines if line.startswith(f"{place / 'autoamp.toml'}:2: unknown op 'sofmax'")]
    assert "did you mean 'softmax'" in told


def test_a_real_apex_is_told_and_the_alias_is_none(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    autoamp.compat.install_as_apex()
    try:
        assert [line for line in lines_of(capsys) if line.startswith("apex no real apex")]
    finally:
        autoamp.compat.uninstall()
    (place / "apex").mkdir()
    (place / "apex" / "__init__.py").write_text("", encoding="utf-8")
    real = place / "apex" / "__init__.py"
    assert [line for line in lines_of(capsys) if line.startswith(f"apex {real}; autoamp adds the modules")]


def test_names_are_those_that_init_rebinds(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "takes_names.py").write_text("from torch import matmul\nOPS = [matmul]\n", encoding="utf-8")
    lines = lines_of(capsys, "--import", "takes_names")
    assert sys.modules.pop("takes_names").matmul is torch.matmul
    first = lines.index("Names bound before init") + 1
    assert re.fullmatch(r"\d+ are rebound by init:", lines[first])
    # The test modules of this process take names too.
    assert [line for line in lines[first:] if line.startswith("takes_names.")] == ["takes_names.matmul"]


def test_the_speed_of_half_precision_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device-type", "cpu"]) == 0
    told = r"{}: a matmul of 512 x 512 is [\d.e+]+ times (as fast as|slower than) in fp32( .noisy: run it again .*)?"
    lines = capsys.readouterr().out.splitlines()
    for dtype in ("float16", "bfloat16"):
        assert [line for line in lines if re.fullmatch(told.format(dtype), line.strip())]


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
def test_the_paths_of_a_model_are_compared(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, code: int, first: str
) -> None:
    (place / f"of_{name}.py").write_text(_MODEL, encoding="utf-8")
    # The default compiles C++.
    monkeypatch.setattr(Handle, "consistency", functools.partialmethod(Handle.consistency, backend=None))
    asked = f"of_{name}:{name}"
    assert main([*QUICK, "--consistency", asked]) == code
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
def test_a_wrong_function_is_told_with_what_is_wrong(
    place: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    (place / "of_errors.py").write_text(_MODEL, encoding="utf-8")
    assert main([*QUICK, "--consistency", name]) == 2
    said = capsys.readouterr().err
    assert f"--consistency {name}: " in said
    assert message in said
