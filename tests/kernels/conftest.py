"""Tests of the distribution autoamp-kernels; those that compute with the compiled library need it installed."""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def emulated_library() -> Path:
    """Return a library whose kernels for GPUs run on the host, compiled unless it is newer than its sources."""
    import fcntl  # Not on Windows.

    header, target = Path(__file__).with_name("emulated_cuda.h"), KERNELS / "build" / "libemulated.so"
    newest = max(path.stat().st_mtime for path in (*(KERNELS / "src").iterdir(), KERNELS / "setup.py", header))
    target.parent.mkdir(exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        # Another worker may be compiling it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file() or target.stat().st_mtime < newest:
            compile_emulated(target, header)
    return target


def compile_emulated(target: Path, header: Path) -> None:
    """Compile that library."""
    fresh = target.with_suffix(f".{os.getpid()}")
    objects = fresh.with_name(f"{fresh.name}.o")
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
    source = ["-include", str(header), "-x", "c++", str(KERNELS / "src" / "cuda.cu"), "-x", "none"]
    cpu = ["-U__CUDACC__", "-Dak_cpu_lamb=ak_host_lamb", "-c", str(KERNELS / "src" / "cpu.cpp"), "-o", str(objects)]
    subprocess.run([str(COMPILER), *flags[:2], *flags[3:], *cpu], check=True)
    subprocess.run([str(COMPILER), *flags, *source, str(objects), "-o", str(fresh)], check=True)
    objects.unlink()
    os.replace(fresh, target)


def imported_anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the package from its sources once more: it loads its library once. The test's end takes it back."""

    def imported() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "autoamp_kernels"]

    monkeypatch.syspath_prepend(str(KERNELS))
    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    found = importlib.import_module("autoamp_kernels")
    for name in imported():
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))
    return found


@pytest.fixture
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[int]]]:
    """Give a test file a package that sends CPU tensors to kernels for GPUs.

    Returns what tells blocks and stream of each new launch.
    """
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("AUTOAMP_KERNELS_LIBRARY", str(emulated_library()))
    monkeypatch.setenv("EMULATED_CUDA", "1")
    monkeypatch.setattr(request.module, "autoamp_kernels", imported_anew(monkeypatch))
    loaded = ctypes.CDLL(str(emulated_library()))
    loaded.emulated_launches.restype = ctypes.c_char_p

    def launches() -> list[list[int]]:
        return [list(map(int, line.split())) for line in loaded.emulated_launches().decode().splitlines()]

    launches()
    return launches


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.emulated)])
def device(request: pytest.FixtureRequest) -> str:
    """Run a test by the kernels for CPUs, and by those for GPUs on an emulated one."""
    if request.param == "cuda":
        request.getfixturevalue("emulated")
    return str(request.param)
