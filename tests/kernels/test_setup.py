"""The build of the distribution: nvcc of any version, and what a wheel weighs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.kernels.conftest import KERNELS

# Answers as nvcc does, and refuses what it does not list.
NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release {version}, V{version}.1"; exit 0 ;;
  *--list-gpu-code*) for one in {codes}; do echo "sm_$one"; done; exit 0 ;;
esac
echo "$*" >> "$0.log"
for word in "$@"; do
  case "$word" in
    --compress-mode=*) [ {compresses} = 1 ] || {{ echo "unknown option $word" >&2; exit 1; }} ;;
    -gencode=*code=sm_*)
      case " {codes} " in *" ${{word##*sm_}} "*) ;; *) echo "unsupported $word" >&2; exit 1 ;; esac ;;
  esac
  last="$word"
done
echo image > "$last"
"""


def build(
    folder: Path, version: str, codes: str, wanted: str | None = None
) -> tuple[subprocess.CompletedProcess[str], dict[str, list[int]] | None]:
    """Build the CUDA kernels with an nvcc of a version that knows some architectures; return what the image has."""
    command = folder / "bin" / "nvcc"
    command.parent.mkdir()
    compresses = int(tuple(map(int, version.split("."))) >= (12, 8))
    command.write_text(NVCC.format(version=version, codes=codes, compresses=compresses))
    command.chmod(0o755)
    environment = {**os.environ, "CUDA_HOME": str(folder)}
    environment.pop("AUTOAMP_KERNELS_CUDA", None)
    if wanted is not None:
        environment["AUTOAMP_KERNELS_CUDA"] = wanted
    done = subprocess.run(
        [sys.executable, str(KERNELS / "setup.py"), "cuda", str(folder / "made")], env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    contents = folder / "made" / "kernels.json"
    return done, json.loads(contents.read_text()) if contents.is_file() else None


@pytest.mark.parametrize(("version", "codes", "expected"), [
    ("13.0", "75 80 86 90 100 103 120 121", [75, 80, 90, 100, 120]),
    ("12.4", "50 60 70 75 80 86 89 90", [75, 80, 90]),
    ("14.9", "110 130", [110]),
])  # fmt: skip
def test_nvcc_compiles_for_what_it_knows(tmp_path: Path, version: str, codes: str, expected: list[int]) -> None:
    done, contents = build(tmp_path, version, codes)
    assert done.returncode == 0, done.stderr
    assert contents == {"code": expected, "ptx": expected[:1]}
    assert (tmp_path / "made" / "kernels.fatbin").is_file()


def test_an_old_nvcc_is_left_out(tmp_path: Path) -> None:
    done, contents = build(tmp_path, "11.8", "75 80 90")
    assert done.returncode == 0, done.stderr
    assert contents is None
    assert "nvcc 11.8, older than 12.1" in done.stderr
    assert (tmp_path / "made" / "kernels.cu").is_file()


def test_what_was_asked_for_is_not_left_out(tmp_path: Path) -> None:
    done, contents = build(tmp_path, "12.4", "75 80 90", wanted="80 120")
    assert done.returncode != 0
    assert contents is None
    assert "AUTOAMP_KERNELS_CUDA='80 120' has 120, which" in done.stderr
    assert "choose of 75 80 90" in done.stderr


@pytest.mark.emulated
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_a_wheel_is_small(tmp_path: Path) -> None:
    """With CUDA kernels for all architectures it has at most 5 MB."""
    shutil.copytree(KERNELS, tmp_path / "kernels", ignore=shutil.ignore_patterns("build", "*.so", "*.fatbin"))
    environment = {name: value for name, value in os.environ.items() if name != "AUTOAMP_KERNELS_CUDA"}
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path / "kernels", env=environment, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "autoamp_kernels/kernels.fatbin" in zipfile.ZipFile(wheel).namelist()
    assert wheel.stat().st_size <= 5_000_000
