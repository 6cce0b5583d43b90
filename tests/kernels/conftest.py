"""The tests of the distribution autoamp-kernels: as installed, or else built in place where a C++ compiler is found."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from autoamp_kernels.cuda import Modules
    from autoamp_kernels.library import Library

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def is_older(target: Path, *others: Path) -> bool:
    """Tell whether a file is missing, or older than the kernels' sources and other files."""
    sources = [*(KERNELS / "src").iterdir(), KERNELS / "setup.py", *others]
    return not target.is_file() or target.stat().st_mtime < max(path.stat().st_mtime for path in sources)


def build_in_place() -> None:
    """Compile the library beside the package's modules, unless it is newer than its sources."""
    target = KERNELS / "autoamp_kernels" / "libautoamp_kernels.so"
    if is_older(target):
        scratch = KERNELS / "build" / f"tests-{os.getpid()}"
        subprocess.run([sys.executable, KERNELS / "setup.py", "library", target, scratch], check=True)
        shutil.rmtree(scratch)
        # What nvcc makes is compared in a test of its own.
        environment = {**os.environ, "AUTOAMP_KERNELS_CUDA": "0"}
        subprocess.run([sys.executable, KERNELS / "setup.py", "cuda", target.parent], env=environment, check=True)
    sys.path.insert(0, str(KERNELS))
    # What tests start finds them as well: with kernels and without, numbers are not the same bits.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(KERNELS), os.environ.get("PYTHONPATH"))))


def emulated_driver() -> Path:
    """Return a CUDA driver that runs the kernels on the host, compiled unless it is newer than its sources."""
    source = Path(__file__).with_name("emulated_cuda.cpp")
    target = KERNELS / "build" / "libemulated_cuda.so"
    if is_older(target, source):
        target.parent.mkdir(exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-psabi"]
        command = [str(COMPILER), *flags, f"-I{KERNELS / 'src'}", str(source), "-o", str(fresh), "-ldl"]
        subprocess.run(command, check=True)
        os.replace(fresh, target)
    return target


if importlib.util.find_spec("autoamp_kernels") is None and COMPILER is not None:
    build_in_place()

collect_ignore_glob = [] if importlib.util.find_spec("autoamp_kernels") else ["test_*.py"]


@dataclass
class EmulatedCuda:
    """CUDA kernels that run on the host, over the memory of CPU tensors."""

    library: Library
    modules: Modules
    _driver: ctypes.CDLL

    def launches(self) -> list[tuple[str, int, int, int]]:
        """Return kernel, blocks, threads and stream of each launch since the last call."""
        lines = self._driver.emulated_launches().decode().splitlines()
        return [(line.split()[0], *map(int, line.split()[1:])) for line in lines]  # type: ignore[misc]

    def fail(self, function: str, result: int = 0) -> None:
        """Let a function of the driver fail from now on."""
        self._driver.emulated_failure(function.encode(), result)

    def device(self, version: int = 13000, count: int = 1, capability: int = 90) -> None:
        """Set what the driver says of itself and its GPUs."""
        self._driver.emulated_device(version, count, capability)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedCuda]:
    """Send calls with CPU tensors to the CUDA kernels, on an emulated device."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    from autoamp_kernels import calls
    from autoamp_kernels.abi import CUDA
    from autoamp_kernels.cuda import Modules, Packaged, unit_of
    from autoamp_kernels.library import library

    path = emulated_driver()
    driver = ctypes.CDLL(str(path))
    driver.emulated_launches.restype = ctypes.c_char_p
    monkeypatch.setattr(Packaged, "covers", lambda self, capability: True)
    monkeypatch.setattr(Packaged, "read", lambda self: b"emulated")
    cuda = EmulatedCuda(library(), Modules(library(), driver=str(path)), driver)

    def fill(kernel: str, args: Any, device: Any) -> None:
        args.head.module, args.head.stream = cuda.modules.open(0, unit_of(kernel, args)), 7

    monkeypatch.setattr(calls, "device_code", lambda device: CUDA)
    monkeypatch.setattr(calls, "fill_cuda", fill)
    cuda.launches()
    yield cuda
    cuda.fail("")
    cuda.device()


@pytest.fixture(params=["plain", "avx2", "avx512"])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with each variant of the CPU build that this machine can run."""
    from autoamp_kernels.errors import KernelError
    from autoamp_kernels.library import library

    before = library().cpu_variant
    try:
        library().use_cpu_variant(request.param)
    except KernelError as error:
        pytest.skip(str(error))
    yield str(request.param)
    library().use_cpu_variant(before)
