"""What is built and loaded: nvcc of any version, a wheel, and why a kernel cannot run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.kernels.conftest import KERNELS, emulated_library, imported_anew

# Answers as nvcc does, and refuses what it does not list.
NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release {version}, V{version}.1"; exit 0 ;;
  *--list-gpu-code*) for one in {codes}; do echo "sm_$one"; done; exit 0 ;;
esac
echo "$*" >> "$0.log"
for word in "$@"; do last="$word"; done
echo made > "$last"
"""

# Stands in for the C++ compiler, which takes seconds: other tests compile the kernels for CPUs.
CXX = """#!/bin/sh
for word in "$@"; do last="$word"; done
echo made > "$last"
"""


def build(folder: Path, version: str, codes: str, wanted: str = "") -> tuple[subprocess.CompletedProcess[str], str]:
    """Build the library with an nvcc of a version that knows some architectures; return what nvcc was called with."""
    command, compiler = folder / "bin" / "nvcc", folder / "bin" / "c++"
    command.parent.mkdir()
    command.write_text(NVCC.format(version=version, codes=codes))
    compiler.write_text(CXX)
    for one in (command, compiler):
        one.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(KERNELS / "setup.py"), "library", str(folder / "made.so"), str(folder), "-O0"],
        env={**os.environ, "CXX": str(compiler), "CUDA_HOME": str(folder), "AUTOAMP_KERNELS_CUDA": wanted},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    log = Path(f"{command}.log")
    return done, log.read_text() if log.is_file() else ""


@pytest.mark.parametrize(("version", "codes", "wanted", "expected"), [
    ("13.0", "75 80 86 90 100 103 120 121", "", [75, 80, 90, 100, 120]),
    ("12.4", "50 60 70 75 80 86 89 90", "", [75, 80, 90]),
    ("12.4", "50 60 70 75 80 86 89 90", "86", [86]),
    ("14.9", "110 130", "", [110]),
])  # fmt: skip
def test_nvcc_compiles_for_what_it_knows(
    tmp_path: Path, version: str, codes: str, wanted: str, expected: list[int]
) -> None:
    done, called = build(tmp_path, version, codes, wanted)
    assert done.returncode == 0, done.stderr
    for one in expected:
        assert f"code=sm_{one}" in called
    assert called.count("code=sm_") == len(expected)
    assert f"code=compute_{expected[0]} -DAK_OLDEST_CARD={expected[0]}" in called


@pytest.mark.parametrize(("version", "wanted", "fails", "messages"), [
    ("11.8", "", False, ["nvcc 11.8, older than 12.1"]),
    ("12.4", "80 120", True, ["AUTOAMP_KERNELS_CUDA='80 120' has 120, which", "choose of 75 80 90"]),
])  # fmt: skip
def test_an_old_nvcc_is_left_out_but_no_card_that_was_asked_for(
    tmp_path: Path, version: str, wanted: str, fails: bool, messages: list[str]
) -> None:
    done, called = build(tmp_path, version, "75 80 90", wanted)
    assert bool(done.returncode) is fails, done.stderr
    assert called == ""
    assert all(message in done.stderr for message in messages)


@pytest.mark.emulated
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_a_wheel_with_kernels_for_all_cards_is_small_and_loads(tmp_path: Path) -> None:
    shutil.copytree(KERNELS, tmp_path / "kernels", ignore=shutil.ignore_patterns("build", "*.so"))
    environment = {name: value for name, value in os.environ.items() if name != "AUTOAMP_KERNELS_CUDA"}
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path / "kernels", env=environment, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size <= 6_000_000
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    program = "import autoamp_kernels as one; print(one.__file__, *one.backends())"
    environment["PYTHONPATH"] = str(tmp_path / "installed")
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert str(tmp_path) in done.stdout
    assert "kernels=('lamb_',)" in done.stdout
    assert "nvcc" not in done.stdout


def reason(monkeypatch: pytest.MonkeyPatch, device_type: str, **environment: str) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (found,) = (one for one in imported_anew(monkeypatch).backends() if one.device_type == device_type)
    monkeypatch.undo()
    assert bool(found.kernels) == (found.reason == ", ".join(found.kernels))
    return found.reason


def test_why_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "unset it" in reason(monkeypatch, "cpu", AUTOAMP_KERNELS="0")
    empty = tmp_path / "empty.so"
    assert "is missing; install" in reason(monkeypatch, "cpu", AUTOAMP_KERNELS_LIBRARY=str(empty))
    empty.write_text("")
    assert "cannot be loaded" in reason(monkeypatch, "cuda", AUTOAMP_KERNELS_LIBRARY=str(empty))


@pytest.mark.emulated
@pytest.mark.parametrize(("environment", "why"), [
    ({}, "adam_, lamb_, sgd_"),
    ({"EMULATED_DRIVER": "0"}, "the driver is missing or older than 12.1"),
    ({"EMULATED_DEVICES": "0"}, "no GPU of compute capability 7.5 or later"),
    ({"EMULATED_CARD": "70"}, "no GPU of compute capability 7.5 or later"),
])  # fmt: skip
def test_kernels_for_a_gpu_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], why: str
) -> None:
    environment = {"AUTOAMP_KERNELS_LIBRARY": str(emulated_library()), **environment}
    assert why in reason(monkeypatch, "cuda", **environment)
