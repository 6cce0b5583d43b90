"""Every block of code of the documentation runs, by itself: Python in a process of its own, commands in a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.pages import BLOCKS, ROOT, Block, train_script

RUN = [block for block in BLOCKS if block.left_out is None and block.language in ("bash", "python")]


def environ() -> dict[str, str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def run_python() -> Iterator[Callable[[Path], tuple[int, str]]]:
    """Run a script in a process of its own; return its exit code and what it printed."""
    command = [sys.executable, "-m", "tests.docs.forks"]
    server = subprocess.Popen(
        command, cwd=ROOT, env=environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def run(script: Path) -> tuple[int, str]:
        assert server.stdin is not None
        assert server.stdout is not None
        output = script.with_suffix(".txt")
        asked = {"script": str(script), "folder": str(script.parent), "output": str(output)}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return code, output.read_text(encoding="utf-8")

    with server:
        yield run
        server.communicate()


@pytest.mark.docs
@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_runs_by_itself(block: Block, tmp_path: Path, run_python: Callable[[Path], tuple[int, str]]) -> None:
    # What a reader has at hand: a script of his own, and the examples.
    (tmp_path / "train.py").write_text(train_script(), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if block.language == "python":
        script = tmp_path / "block.py"
        script.write_text(block.code, encoding="utf-8")
        code, printed = run_python(script)
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.code]
        done = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=600)
        code, printed = done.returncode, done.stdout + done.stderr
    assert code == 0, f"{block}\n{block.code}\n{printed}"
