"""The tests of the distribution autoamp-kernels: as installed, or else built in place where a C++ compiler is found."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def is_older(target: Path, *others: Path) -> bool:
    """Tell whether a file is missing, or older than the kernels' sources and other files."""
    sources = [*(KERNELS / "src").iterdir(), KERNELS / "setup.py", *others]
    return not target.is_file() or target.stat().st_mtime < max(path.stat().st_mtime for path in sources)


def is_installed() -> bool:
    """Tell whether the package is installed in the version of these sources."""
    version = re.search(r'^version = "(.*)"', (KERNELS / "pyproject.toml").read_text(), re.MULTILINE)
    try:
        return version is not None and importlib.metadata.version("autoamp-kernels") == version[1]
    except importlib.metadata.PackageNotFoundError:
        return False


def build_in_place() -> None:
    """Compile the library beside the package's modules, unless it is newer than its sources."""
    target = KERNELS / "autoamp_kernels" / "libautoamp_kernels.so"
    if is_older(target):
        scratch = KERNELS / "build" / f"tests-{os.getpid()}"
        command = [sys.executable, KERNELS / "setup.py", "library", target, scratch]
        subprocess.run(command, check=True, env={**os.environ, "AUTOAMP_KERNELS_CUDA": "0"})
        shutil.rmtree(scratch)
    sys.path.insert(0, str(KERNELS))
    # What tests start finds them as well: with kernels and without, numbers are not the same bits.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(KERNELS), os.environ.get("PYTHONPATH"))))


def emulated_library() -> Path:
    """Return a library whose kernels for GPUs run on the host, compiled unless it is newer than its sources."""
    header = Path(__file__).with_name("emulated_cuda.h")
    target = KERNELS / "build" / "libemulated.so"
    import fcntl  # Not on Windows.

    target.parent.mkdir(exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        # Another worker may be compiling it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_emulated(target, header)
    return target


def compile_emulated(target: Path, header: Path) -> None:
    """Compile that library, unless it is newer than its sources."""
    if is_older(target, header):
        fresh = target.with_suffix(f".{os.getpid()}")
        objects = fresh.with_name(f"{fresh.name}.o")
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
        source = ["-include", str(header), "-x", "c++", str(KERNELS / "src" / "cuda.cu"), "-x", "none"]
        cpu = ["-U__CUDACC__", "-Dak_cpu_lamb=ak_host_lamb", "-c", str(KERNELS / "src" / "cpu.cpp"), "-o", str(objects)]
        subprocess.run([str(COMPILER), *flags[:2], *flags[3:], *cpu], check=True)
        subprocess.run([str(COMPILER), *flags, *source, str(objects), "-o", str(fresh)], check=True)
        objects.unlink()
        os.replace(fresh, target)


if not is_installed() and COMPILER is not None:
    build_in_place()

collect_ignore_glob = [] if importlib.util.find_spec("autoamp_kernels") else ["test_*.py"]


def imported_anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the package once more: it loads its library once. Until the test ends ``import`` finds this one."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "autoamp_kernels"]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("autoamp_kernels")


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
