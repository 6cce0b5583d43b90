"""The examples and the code in the documentation run, and say what they should."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


QUICK = ("--width", "16", "--device", "cpu")


@needs_example_packages
@pytest.mark.parametrize("rich", [True, False])
def test_digits_prints_a_table_with_and_without_rich(
    digits: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rich: bool
) -> None:
    if not rich:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setitem(sys.modules, "rich", None)
    # Of the accuracy of one epoch nothing is asked.
    monkeypatch.setattr(digits, "TOLERANCE", 100.0)
    assert digits.main(["--seeds", "2", "--epochs", "1", *QUICK]) == 0
    captured = capsys.readouterr()
    table = {line.split()[0]: line for line in captured.out.splitlines() if line}
    assert re.match(r"\W*mode +accuracy % +kept +epoch +speed +skipped", table["mode"])
    # The one that init() takes on a CPU.
    assert "fp16" not in table
    row = r"\W*bf16 +[\d.]+ ± [\d.]+ +[\d,]+ KiB +\d+ ms +[\d.]+ \([\d.]+-[\d.]+\) +0 *$"
    lines = [line for line in captured.out.splitlines() if "bf16" in line]
    assert re.match(row, lines[0])
    assert re.match("bf16.*(pays here|does not pay here|takes about the time|too noisy)", lines[1])
    assert ("run 4 of 4: bf16, seed 1" in captured.err) is not rich


@needs_example_packages
@pytest.mark.parametrize(
    ("times", "said", "pays"),
    [
        ((2.0, 1.8, 2.2), "bf16 pays here: 2.00 (1.80-2.20) times the speed of fp32, keeps 40% less", True),
        ((0.5, 0.4, 0.6), "bf16 does not pay here: 0.50 (0.40-0.60) times the speed of fp32; it keeps 40% less", False),
        ((1.0, 0.98, 1.02), "bf16 takes about the time of fp32 here", False),
        ((1.3, 0.6, 1.9), "bf16: too noisy to tell whether it is faster: speed 1.30 (0.60-1.90)", True),
        ((2.5, 1.5, 4.0), "bf16 pays here", True),
        ((2.0,), "bf16: one seed cannot tell whether it is faster", True),
    ],
)
def test_digits_says_whether_it_pays(digits: ModuleType, times: tuple[float, ...], said: str, pays: bool) -> None:
    exact = [digits.Run(98.0, 1000, 0, 1.0, seconds) for seconds in times]
    mixed = [digits.Run(98.5, 600, 0, 1.0, 1.0) for _ in times]
    one = digits.Compared.of("bf16", mixed, exact)
    assert one.verdict.startswith(said)
    assert one.verdict.endswith("accuracy +0.50 points.")
    assert one.pays is pays


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
    # The summary of a run is one line in a pipe.
    assert done.stderr.count("\n") == len(command[:1])


def test_the_planted_fault_is_found_and_its_entry_avoids_it(tmp_path: Path) -> None:
    command = (
        "-m",
        "autoamp",
        "run",
        "--device-type",
        "cpu",
        "--dtype",
        "fp16",
        "--report",
        str(tmp_path / "one.json"),
    )
    done = run(*command, str(ROOT / "examples" / "overflow.py"), "--steps", "40")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))
    lines = (ROOT / "examples" / "overflow.py").read_text(encoding="utf-8").splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if "square = " in text)
    assert found["verdict"]["sentence"].startswith(
        "2 of 40 steps skipped, all half-precision op; forward overflow in mul"
    )
    assert found["skips"]["groups"][0]["overflow"]["location"].endswith(f"overflow.py:{line}")
    entries = [one["op"] for one in found["remedies"] if one["policy"] == "fp32"]
    mended = tmp_path / "mended.toml"
    mended.write_text(f"schema = 1\nfp32 = {json.dumps(entries)}\n", encoding="utf-8")
    command = (*command[:-1], str(tmp_path / "two.json"), "--lists", str(mended))
    done = run(*command, str(ROOT / "examples" / "overflow.py"), "--steps", "40")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "two.json").read_text(encoding="utf-8"))
    # With the large values in it the first scale may be too large for the backward pass.
    assert "; no forward overflow" in found["verdict"]["sentence"]
    assert {group["kind"] for group in found["skips"]["groups"]} <= {"scale_search"}
    assert found["remedies"] == []
