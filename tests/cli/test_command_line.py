"""The options of the command `autoamp`, which come without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autoamp
from autoamp.cli import main
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
        (["lists", "-h"], 0, "Shows the rules that apply in this folder"),
        (["doctor", "-h"], 0, "Shows the versions, the device with the half dtypes"),
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
        order = list(dict.fromkeys(policies[dtype].values()))
        assert order == [word for word in (dtype, "fp32", "promote", "banned", "none") if word in order]
        assert policies[dtype]["linear"] == dtype
    assert (policies["fp16"]["layer_norm"], policies["bf16"]["layer_norm"]) == ("fp32", "none")
