"""Doors: the import never fails, and a closed door says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import autoamp_kernels
import pytest
import torch
from autoamp_kernels.library import Library, library

REPORT = """
import autoamp_kernels, torch
print(autoamp_kernels.doors()[0])
try:
    autoamp_kernels.adam_(*[[torch.ones(2)] for _ in range(4)], lr=1.0, beta1=0.9, beta2=0.9, eps=1.0, step=1)
except autoamp_kernels.KernelError as error:
    print(error)
"""


def report(program: str = REPORT, **environment: str) -> str:
    """Return what a program prints in a process of its own."""
    # Where the tests built the package in place, no other process would find it.
    place = str(Path(autoamp_kernels.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": place, **environment}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_cpu_door_is_open() -> None:
    assert autoamp_kernels.available("cpu")
    assert {door.name for door in autoamp_kernels.doors()} == {"cpu", "cuda"}
    assert all(door.reason for door in autoamp_kernels.doors())


def test_turned_off() -> None:
    printed = report(AUTOAMP_KERNELS="0")
    assert printed.count("turned off by AUTOAMP_KERNELS=0; unset it") == 2


def test_not_installed(tmp_path: Path) -> None:
    printed = report(AUTOAMP_KERNELS_LIBRARY=str(tmp_path / "none.so"))
    assert printed.count("none.so is missing") == 2


def test_damaged(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    assert report(AUTOAMP_KERNELS_LIBRARY=str(broken)).count("cannot be loaded") == 2


def test_without_torch() -> None:
    printed = report("""
import sys
sys.modules["torch"] = None
import autoamp_kernels
print(autoamp_kernels.doors()[0].open)
try:
    autoamp_kernels.adam_
except autoamp_kernels.KernelError as error:
    print(error)
""")
    assert printed.startswith("True\n")
    assert "adam_ needs torch, which failed" in printed


def test_a_mismatch_is_told_by_the_kernels_name() -> None:
    from autoamp_kernels.abi import KERNELS, Head

    for name, kind in KERNELS.items():
        for head in (Head(size=8, version=1), Head(size=0, version=1)):
            with pytest.raises(autoamp_kernels.KernelError, match=f"kernel {name}: its struct of arguments"):
                library().call(name, kind(head=head))


def test_unknown_variant() -> None:
    with pytest.raises(autoamp_kernels.KernelError, match=r"'sse9'.*choose"):
        library().use_cpu_variant("sse9")


def test_a_library_of_its_own_can_be_loaded() -> None:
    assert Library(library().path).cpu_variant in ("plain", "avx2", "avx512")


def test_children_of_a_fork_have_threads_of_their_own() -> None:
    # Torch's own threads do not outlive a fork, so the child calls nothing of torch's that would want them.
    printed = report("""
import os, torch, autoamp_kernels
def step(lists):
    autoamp_kernels.adam_(*lists, lr=1.0, beta1=0.9, beta2=0.9, eps=1.0, step=1)
    return lists[0][1][-2:].tolist()
one, two = ([[torch.ones(40000), torch.ones(70000)] for _ in range(4)] for _ in range(2))
torch.set_num_threads(3)
before = step(one)
child = os.fork()
if not child:
    os._exit(0 if step(two) == before else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert printed == "0\n"


def test_threads_give_the_same_bits() -> None:
    def step() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        lists = [[torch.rand(size, generator=generator) for size in (5, 100_000, 0, 70_000)] for _ in range(4)]
        autoamp_kernels.adam_(*lists, lr=1.0, beta1=0.9, beta2=0.9, eps=1.0, step=1)
        return lists[0]

    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 3):
            torch.set_num_threads(threads)
            results.append(step())
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])
