"""docs/howto/memory.md: freed memory is kept. Page faults are counted in processes of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autoamp.cli.memory import why_not_kept
from tests.launches import Ended, environment, forks, launched, written

pytestmark = pytest.mark.skipif(why_not_kept() is not None, reason=f"needs glibc's own malloc: {why_not_kept()}")

# Each block is a little larger than all before, so that glibc has it from the system unless told otherwise: 123,000
# page faults in all. In a heap that keeps what is freed only the first one is new, and another each time that something
# small lies behind the block that was freed.
STEPS = """
import resource, sys
import {imported}
def steps():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for sixteenths in range(480, 496):
        block = {block}
        del block
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print("kept" if faults < 70000 else f"given back: {{faults}} page faults", flush=True)
if __name__ == "__main__":
    {main}
"""
WITH_TORCH = {"imported": "autoamp, torch", "block": "torch.ones(sixteenths << 14)"}
SPAWNED = """
    import multiprocessing
    child = multiprocessing.get_context("spawn").Process(target=steps)
    child.start()
    child.join()
    steps()
"""
# The module by itself: what is tested is the C library's, and torch takes seconds to import.
ALONE = STEPS.format(
    imported="runpy",
    block="bytearray(sixteenths << 16)",
    main='print(runpy.run_path(sys.argv[1])["keep_freed_memory"]()); steps()',
)
MODULE = str(Path(__file__).parents[2] / "autoamp" / "cli" / "memory.py")
FORWARDS = """
#include <stddef.h>
void *__libc_malloc(size_t size);
void *malloc(size_t size) { return __libc_malloc(size); }
"""


def alone(folder: Path, **variables: str) -> list[str]:
    """Return the lines of a process that keeps its memory, in an environment with these variables."""
    written(folder, {"alone.py": ALONE})
    return subprocess.run(
        [sys.executable, "alone.py", MODULE], cwd=folder, env={**environment(), **variables}, capture_output=True,
        text=True, check=True, timeout=60,
    ).stdout.splitlines()  # fmt: skip


def test_freed_memory_is_kept(tmp_path: Path) -> None:
    assert alone(tmp_path) == ["kept", "kept"]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072", "the environment has MALLOC_TRIM_THRESHOLD_"),
        ("MALLOC_MMAP_THRESHOLD_", "131072", "the environment has MALLOC_MMAP_THRESHOLD_"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=9", "GLIBC_TUNABLES has glibc.malloc.mmap_max"),
    ],
)
def test_settings_of_malloc_in_the_environment_stay(tmp_path: Path, name: str, value: str, why: str) -> None:
    said, done = alone(tmp_path, **{name: value})
    assert said == f"not kept: {why}"
    assert done.startswith("given back")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_another_allocator_is_left_alone(tmp_path: Path) -> None:
    written(tmp_path, {"other.c": FORWARDS})
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", "libother_malloc.so", "other.c"], cwd=tmp_path, check=True, timeout=60
    )
    said, done = alone(tmp_path, LD_PRELOAD=str(tmp_path / "libother_malloc.so"))
    assert said == "not kept: malloc is that of libother_malloc.so, not of glibc"
    assert done.startswith("given back")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Programs under `autoamp run`, by what they are to show."""
    scripts = {
        "spawns.py": STEPS.format(main=SPAWNED.strip(), **WITH_TORCH),
        "inits.py": STEPS.format(main="autoamp.init(device_type='cpu'); steps()", **WITH_TORCH),
    }
    run = ["run", "--device-type", "cpu"]
    runs = {
        "kept": [*run, "spawns.py"],
        "O0": [*run, "--opt-level", "O0", "inits.py"],
        "not kept": [*run, "--no-keep-memory", "spawns.py"],
        "init alone": ["python", "inits.py"],
    }
    return launched(written(tmp_path_factory.mktemp("steps"), scripts), runs)


@forks
@pytest.mark.parametrize(("name", "done"), [("kept", ["kept"] * 2), ("O0", ["kept"])])
def test_runs_and_their_children_keep_freed_memory_and_say_so(
    name: str, done: list[str], ended: dict[str, Ended]
) -> None:
    assert ended[name].out.splitlines() == done, ended[name].err
    assert " MiB, freed memory kept; " in ended[name].err


@forks
def test_freed_memory_is_not_kept_unless_wanted_nor_by_init(ended: dict[str, Ended]) -> None:
    for name, count in (("not kept", 2), ("init alone", 1)):
        lines = ended[name].out.splitlines()
        assert [line.partition(":")[0] for line in lines] == ["given back"] * count, ended[name].err
        assert "freed memory" not in ended[name].err
    assert "; peak RSS " in ended["not kept"].err
