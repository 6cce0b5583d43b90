"""The examples and the code in the documentation run, and say what they should."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from autoamp.rules.loader import load_table

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits.py"

needs_example_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sklearn", "rich")),
    reason="the extra 'examples' is not installed",
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the tree on the path, so that the package need not be installed."""
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def rows_of(table: str) -> dict[str, list[str]]:
    """Return the cells of a printed table by their row's first cell."""
    lines = [line.strip("│ ").split("│") for line in table.splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


@pytest.fixture
def digits() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("digits_example", DIGITS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@needs_example_packages
def test_digits_prints_a_table_and_mixed_precision_is_as_accurate() -> None:
    done = run(str(DIGITS), "--seeds", "1", "--epochs", "8", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    assert list(rows) == ["fp32", "fp16", "bf16"]
    accuracy, saved, skipped, scale, _ = zip(*rows.values(), strict=True)
    assert all(float(text.split()[0]) > 90 for text in accuracy)
    fp32_bytes, *half_bytes = (int(text.removesuffix(" KiB").replace(",", "")) for text in saved)
    assert all(0.4 * fp32_bytes < count < 0.8 * fp32_bytes for count in half_bytes)
    assert skipped == ("0", "0", "0")
    assert scale == ("1", "65536", "1")


@needs_example_packages
def test_digits_takes_one_dtype(digits: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    digits.main(["--seeds", "1", "--epochs", "1", "--device", "cpu", "--dtype", "bf16"])
    assert list(rows_of(capsys.readouterr().out)) == ["fp32", "bf16"]


@needs_example_packages
@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--dtype", "fp8"]])
def test_digits_refuses_wrong_arguments(
    digits: ModuleType, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        digits.parse(wrong)
    assert wrong[1] in capsys.readouterr().err


@needs_example_packages
def test_digits_tells_which_mode_is_off(digits: ModuleType) -> None:
    def runs(*accuracies: float) -> list[object]:
        return [digits.Run(accuracy, 1, 0, 1.0, 1.0) for accuracy in accuracies]

    results = {"fp32": runs(98.0, 99.0), "near": runs(98.5, 99.5), "low": runs(97.0, 98.8), "high": runs(99.0, 99.2)}
    assert digits.deviations(results) == pytest.approx({"low": -0.6, "high": 0.6})


@needs_example_packages
def test_digits_exits_with_1_where_a_mode_is_off(digits: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([98.0, 90.0])
    monkeypatch.setattr(digits, "train", lambda *_: digits.Run(next(accuracies), 1, 0, 1.0, 1.0))
    assert digits.main(["--seeds", "1", "--dtype", "bf16", "--device", "cpu"]) == 1


@needs_example_packages
def test_digits_counts_each_saved_storage_once(digits: ModuleType) -> None:
    model = torch.nn.Linear(4, 8)
    counter = digits.SavedBytes(model)
    x = torch.rand(2, 4, requires_grad=True)
    with counter.watching():
        y = torch.nn.functional.linear(x, model.weight)  # saves x and the weight
        (y * y).sum()  # saves y, twice
    assert counter.total == (2 * 4 + 2 * 8) * 4


@needs_example_packages
@pytest.mark.parametrize(
    ("command", "said"),
    [((), ""), (("-m", "autoamp", "run", "--device-type", "cpu"), "autoamp: bfloat16 on cpu (O1); ")],
    ids=["plain", "autoamp"],
)
def test_plain_digits_is_as_accurate_in_mixed_precision(command: tuple[str, ...], said: str) -> None:
    done = run(*command, str(ROOT / "examples" / "plain_digits.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.fullmatch(r"accuracy on 400 held-out images: ([0-9.]+) %", done.stdout.splitlines()[-1])
    assert accuracy is not None
    assert float(accuracy[1]) > 97
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == len(command[:1])


def blocks(path: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_code_of_the_readme_runs(tmp_path: Path) -> None:
    (block,) = blocks(ROOT / "README.md", "python")
    script = tmp_path / "readme.py"
    script.write_text(block, encoding="utf-8")
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["65536.0", "0"]


@pytest.mark.parametrize("page", ["README.md", "docs/lists.md"])
def test_lists_of_the_documentation_are_valid(page: str, tmp_path: Path) -> None:
    tables = [load_table(tomllib.loads(block), start=tmp_path, environ={}) for block in blocks(ROOT / page, "toml")]
    assert tables[0].policy_of("mypkg.losses.focal_loss") is not None
