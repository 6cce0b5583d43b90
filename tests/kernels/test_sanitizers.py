"""The kernels' tests with a CPU build under AddressSanitizer and UndefinedBehaviorSanitizer.

All that runs on a CPU, in every combination of dtypes, with threads; not the kernels for GPUs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import COMPILER, KERNELS

# Not by functions that are chosen as the library is loaded: the sanitizers are not ready then. Nor with optimization:
# it takes longer than the tests, and removes accesses that would be a fault.
FLAGS = ("-O0", "-g", "-DAK_CLONES=", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FOUND = os.path.realpath(shutil.which(COMPILER) or "") if COMPILER else ""
TESTS = ("test_optimizers.py",)

# Reads 2000 elements of 500.
FAULTY = """
import ctypes
from autoamp_kernels.library import LISTS, StepArgs, call
half, wide = (ctypes.c_uint16 * 500)(), (ctypes.c_float * 2000)()
args = StepArgs(device=-1, threads=1, grad_dtype=1, param_dtype=0, half_dtype=-1, tensors=1, chunks=1)
counts, first_chunk = (ctypes.c_int64 * 1)(2000), (ctypes.c_int64 * 2)(0, 1)
args.counts, args.first_chunk = ctypes.addressof(counts), ctypes.addressof(first_chunk)
lists = {name: (ctypes.c_void_p * 1)(ctypes.addressof(half if name == "grads" else wide)) for name in LISTS}
for name in LISTS:
    if name != "halves":
        setattr(args, name, ctypes.addressof(lists[name]))
call("cpu", "lamb", args)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build the library with sanitizers; return an environment in which it is loaded."""
    if "g++" not in Path(FOUND).name:
        pytest.skip(f"wants g++ and its libasan; the compiler here is {FOUND or 'missing'}")
    folder = tmp_path_factory.mktemp("sanitized")
    build = [sys.executable, KERNELS / "setup.py", "library", folder / "sanitized.so", folder / "objects", *FLAGS]
    subprocess.run(build, check=True, env={**os.environ, "AUTOAMP_KERNELS_CUDA": "0"})
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
        "PYTHONPATH": os.pathsep.join(filter(None, (str(KERNELS), os.environ.get("PYTHONPATH")))),
        "AUTOAMP_KERNELS_CUDA": "0",
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
    # In one process: to import torch under the sanitizers takes longer than the tests.
    done = run(environment, "-m", "pytest", "-n", "0", "-q", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
