"""Every block of code of the documentation runs, by itself: Python in a process of its own, commands in a shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.pages import BLOCKS, ROOT, Block, train_script

RUN = [block for block in BLOCKS if block.left_out is None and block.language in ("bash", "python")]


def environ() -> dict[str, str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


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


def is_shown(shown: str, printed: str) -> bool:
    """Tell whether words stand in what was printed, one after the other; ``...`` stands for any. Numbers may differ."""
    parts = [words(part) for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]
    return re.search(".*?".join(map(re.escape, parts)), words(printed)) is not None


def words(text: str) -> str:
    """Return a text in one line, with a sign in place of each number."""
    return " ".join(re.sub(r"\b(\d[\d,.]*(e-?\d+)?|nan)(?!\w)", "#", text).split())


@pytest.mark.docs
@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_runs_by_itself(block: Block, tmp_path: Path, run_python: Callable[[Path], tuple[int, str]]) -> None:
    # What a reader has at hand: a script of his own, and the examples.
    (tmp_path / "train.py").write_text(train_script(), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if block.language == "python":
        script = tmp_path / "script.py"
        script.write_text(block.code, encoding="utf-8")
        code, printed = run_python(script)
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.code]
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=tmp_path, env=environ(), timeout=600, **both)
        code, printed = done.returncode, done.stdout
    assert code == 0, f"{block}\n{block.code}\n{printed}"
    if block.shown is not None:
        assert is_shown(block.shown, printed), f"{block} shows\n{block.shown}\nand it prints\n{printed}"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss: 0.629 of 90\n", "loss: nan of 9e-05\n", True),
        ("one\n...\nfour\n", "one 1\ntwo\nthree\n", False),
        ("one 3\n...\nthree\n", "zero\none 1\ntwo\nthree\n", True),
        ("loss 1\n", "lost 1\n", False),
        ("three\n...\none\n", "one\nthree\n", False),
    ],
)
def test_what_a_page_shows_is_compared_but_for_numbers_and_line_breaks(shown: str, printed: str, same: bool) -> None:
    assert is_shown(shown, printed) == same
