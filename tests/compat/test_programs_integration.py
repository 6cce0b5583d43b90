"""Programs that import `apex` and know nothing of autoamp, in the style of 2018 to 2022, run as they are."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launches import Ended, launched

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PROGRAMS = sorted((HERE / "programs").glob("*.py"))

# These look at fp16 itself, or at a scale that moves, which bf16 has no need of.
FP16_ALONE = {
    "bert_2019_fused_adam", "bert_flat_allreduce", "fp16_optimizer_by_hand", "gan_o1", "poked_internals"
}  # fmt: skip

CASES = [
    pytest.param(program, dtype, id=f"{program.stem}-{dtype}", marks=() if dtype == "float16" else pytest.mark.variants)
    for dtype in ("float16", "bfloat16")
    for program in PROGRAMS
    if dtype == "float16" or program.stem not in FP16_ALONE
]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@functools.cache
def rows(dtype: str) -> dict[str, dict[str, Any]]:
    """Run all programs of a dtype in one process, one after the other: the import of torch takes longer than they do.

    A program that a crash kept from running has no row.
    """
    chosen = [str(case.values[0]) for case in CASES if case.values[1] == dtype]
    done = subprocess.run(
        [sys.executable, str(HERE / "run_programs.py"), dtype, *chosen],
        capture_output=True, text=True, env=environment(), timeout=300,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        found.append({"program": "", "error": done.stderr})
    return {Path(row["program"]).stem: row for row in found}


@pytest.mark.parametrize(("program", "dtype"), CASES)
def test_program_runs_unmodified(program: Path, dtype: str) -> None:
    found = rows(dtype)
    assert "" not in found, found[""]["error"]
    row = found[program.stem]
    assert not row["error"], row["error"]
    assert "->" in row["output"], "the program did not say what it learned"
    assert row["changed"] == [], "torch is not what it was before"
    assert row["left"] == [], "modules of the alias are left"


def test_programs_know_nothing_of_autoamp() -> None:
    assert len(PROGRAMS) >= 19
    for program in PROGRAMS:
        text = program.read_text(encoding="utf-8")
        assert "autoamp" not in text
        assert "apex" in text


RUNS = {
    "accumulate_delay_unscale": ([], ["O3"], "O3: "),
    "gan_o1": ([], ["--niter", "50", "--opt_level", "O2"], "distance"),
    "registered": (["--dtype", "bf16"], [], "loss"),
    "ddp_o2_syncbn": ([], ["--keep-batchnorm-fp32", "True", "--loss-scale", "128.0"], "using apex synced BN"),
}


@pytest.fixture(scope="module")
def ended() -> dict[str, Ended]:
    """How each of RUNS ended under the command."""
    command = ["run", "--device-type", "cpu"]
    return launched(
        HERE / "programs",
        {name: [*command, *options, f"{name}.py", *arguments] for name, (options, arguments, _) in RUNS.items()},
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")
@pytest.mark.parametrize("name", RUNS)
def test_autoamp_run(name: str, ended: dict[str, Ended]) -> None:
    assert ended[name].code == 0, ended[name].err
    assert RUNS[name][2] in ended[name].out
    assert "->" in ended[name].out


def test_a_program_fails_without_the_alias() -> None:
    """Where no apex is installed: what makes the programs run is the alias, and nothing else."""
    done = subprocess.run(
        [sys.executable, str(HERE / "programs" / "old_handle.py")],
        capture_output=True, text=True, env=environment(), timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "No module named 'apex'" in done.stderr
