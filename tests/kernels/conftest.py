"""The tests of the distribution autoamp-kernels: as installed, or else built in place where a C++ compiler is found."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def build_in_place() -> None:
    """Compile the library beside the package's modules, unless it is newer than its sources."""
    target = KERNELS / "autoamp_kernels" / "libautoamp_kernels.so"
    sources = [*(KERNELS / "src").iterdir(), KERNELS / "setup.py"]
    if not target.is_file() or target.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        scratch = KERNELS / "build" / f"tests-{os.getpid()}"
        subprocess.run([sys.executable, KERNELS / "setup.py", "library", target, scratch], check=True)
        shutil.rmtree(scratch)
    sys.path.insert(0, str(KERNELS))


if importlib.util.find_spec("autoamp_kernels") is None and COMPILER is not None:
    build_in_place()

collect_ignore_glob = [] if importlib.util.find_spec("autoamp_kernels") else ["test_*.py"]


@pytest.fixture(params=["plain", "avx2", "avx512"])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with each variant of the CPU build that this machine can run."""
    from autoamp_kernels.doors import library
    from autoamp_kernels.errors import KernelError

    before = library().cpu_variant
    try:
        library().use_cpu_variant(request.param)
    except KernelError as error:
        pytest.skip(str(error))
    yield str(request.param)
    library().use_cpu_variant(before)
