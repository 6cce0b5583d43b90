"""The kernels' tests with a CPU build under AddressSanitizer and UndefinedBehaviorSanitizer.

All variants that this machine runs, all kernels, every combination of dtypes, sizes and offsets by hypothesis, threads.
Not the CUDA kernels, and not what torch compiles around the calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import COMPILER, KERNELS

FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FOUND = os.path.realpath(shutil.which(COMPILER) or "") if COMPILER else ""
TESTS = ("test_optimizers.py", "test_layerwise.py", "test_gradients.py", "test_norms.py", "test_dtypes.py")

# Reads 100 elements of 4.
FAULTY = """
import ctypes, numpy, torch
from autoamp_kernels.abi import ABI, Head, NO_DTYPE, ScaleArgs
from autoamp_kernels.library import library
values, counts, chunks = numpy.ones(4, numpy.float32), numpy.array([100]), numpy.array([0, 1])
table, found = numpy.array([values.ctypes.data]), numpy.zeros(1, numpy.float32)
head = Head(size=ctypes.sizeof(ScaleArgs), version=ABI, threads=1, tensors=1, counts=counts.ctypes.data,
            first_chunk=chunks.ctypes.data)
args = ScaleArgs(head=head, ins=table.ctypes.data, found=found.ctypes.data, out_dtype=NO_DTYPE)
args.grad_scale.number = 1.0
library().call("scale", args)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build the library with sanitizers; return an environment in which it is loaded."""
    if "g++" not in Path(FOUND).name:
        pytest.skip(f"wants g++ and its libasan; the compiler here is {FOUND or 'missing'}")
    folder = tmp_path_factory.mktemp("sanitized")
    build = [sys.executable, KERNELS / "setup.py", "library", folder / "sanitized.so", folder / "objects", *FLAGS]
    subprocess.run(build, check=True)
    preload = [
        subprocess.run([FOUND, f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        **os.environ,
        "AUTOAMP_KERNELS_LIBRARY": str(folder / "sanitized.so"),
        "LD_PRELOAD": " ".join(preload),
        # Python and torch keep what they allocate.
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(KERNELS),
    }


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=1500, check=False
    )


@pytest.mark.sanitizers
def test_a_fault_is_found(environment: dict[str, str]) -> None:
    done = run(environment, "-c", FAULTY)
    assert done.returncode != 0
    assert "ERROR: AddressSanitizer" in done.stderr


@pytest.mark.sanitizers
def test_the_kernels_have_none(environment: dict[str, str]) -> None:
    files = [str(Path(__file__).with_name(name)) for name in TESTS]
    done = run(environment, "-m", "pytest", "-n", "2", "-q", "-k", "not compile", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
