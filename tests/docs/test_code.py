"""Every block of code of the documentation runs, by itself: Python in a process of its own, commands in a shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.outputs import at_hand, is_shown, renewed, run_in_shell
from tests.docs.pages import BLOCKS, ROOT, Block
from tests.launches import Ended, launched

PYTHON, BASH = (
    [block for block in BLOCKS if block.left_out is None and block.language == language]
    for language in ("python", "bash")
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[Block, Ended]:
    """The blocks of Python, each in a process and a folder of its own."""
    scripts = {block: at_hand(tmp_path_factory.mktemp("block")) / "script.py" for block in PYTHON}
    for block, script in scripts.items():
        script.write_text(block.code, encoding="utf-8")
    runs = launched(ROOT, {str(block): ["python", str(scripts[block])] for block in PYTHON})
    return {block: runs[str(block)] for block in PYTHON}


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
    check(block, *run_in_shell(block, tmp_path))


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss: 0.629 of 90\n", "loss: nan of 9e-05\n", True),
        ("one\n...\nfour\n", "one 1\ntwo\nthree\n", False),
        ("one 3\n...\nthree\n", "zero\none 1\ntwo\nthree\n", True),
        ("loss 1\n", "lost 1\n", False),
        ("three\n...\none\n", "one\nthree\n", False),
        ("ops 93 float16; casts 3 to\nfloat32; 1.7 s", "ops 93 float16; casts 3 to float32; 2 s", True),
        ("ops 93 float16; 1.7 s", "ops 94 float16; 1.7 s", False),
        ("0 of 90 steps skipped", "1 of 90 steps skipped", False),
    ],
)
def test_what_a_page_shows_is_compared_with_its_counts_and_without_other_numbers(
    shown: str, printed: str, same: bool
) -> None:
    assert is_shown(shown, printed) == same


def test_numbers_of_a_page_are_renewed_in_place() -> None:
    shown = "loss: 0.629\n...\nops 93 float16,\n31 float32\n"
    assert renewed(shown, "loss: nan\nx 1\nops 279 float16, 0 float32\n") == (
        "loss: nan\n...\nops 279 float16,\n0 float32\n"
    )
