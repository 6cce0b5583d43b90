"""Every block of code of the documentation runs, by itself: Python in a process of its own, commands in a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import BLOCKS, ROOT, Block, train_script
from tests.launches import Ended, environment, launched

PYTHON, BASH = (
    [block for block in BLOCKS if block.left_out is None and block.language == language]
    for language in ("python", "bash")
)


def environ() -> dict[str, str]:
    """Commands find the Python of this environment, and the tree."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {**environment(), "PATH": path, "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[Block, Ended]:
    """The blocks of Python, each in a process and a folder of its own."""
    scripts = {block: at_hand(tmp_path_factory.mktemp("block")) / "script.py" for block in PYTHON}
    for block, script in scripts.items():
        script.write_text(block.code, encoding="utf-8")
    runs = launched(ROOT, {str(block): ["python", str(scripts[block])] for block in PYTHON})
    return {block: runs[str(block)] for block in PYTHON}


def at_hand(folder: Path) -> Path:
    """Give a folder what a reader has at hand: a script of his own, and the examples."""
    (folder / "train.py").write_text(train_script(), encoding="utf-8")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def is_shown(shown: str, printed: str) -> bool:
    """Tell whether words stand in what was printed, one after the other; ``...`` stands for any. Numbers may differ."""
    parts = [words(part) for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]
    return re.search(".*?".join(map(re.escape, parts)), words(printed)) is not None


def words(text: str) -> str:
    """Return a text in one line, with a sign in place of each number."""
    return " ".join(re.sub(r"\b(\d[\d,.]*(e-?\d+)?|nan)(?!\w)", "#", text).split())


def check(block: Block, code: int, printed: str) -> None:
    assert code == 0, f"{block}\n{block.code}\n{printed}"
    if block.shown is not None:
        assert is_shown(block.shown, printed), f"{block} shows\n{block.shown}\nand it prints\n{printed}"


# One worker runs them all.
@pytest.mark.docs
@pytest.mark.xdist_group("python")
@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_block_of_python_runs_by_itself(block: Block, ended: dict[Block, Ended]) -> None:
    check(block, ended[block].code, ended[block].out + ended[block].err)


@pytest.mark.docs
@pytest.mark.parametrize("block", BASH, ids=str)
def test_a_block_of_commands_runs_by_itself(block: Block, tmp_path: Path) -> None:
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    done = subprocess.run(
        command, cwd=at_hand(tmp_path), env=environ(), timeout=600, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    check(block, done.returncode, done.stdout)


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
