"""What commands of the pages print, beside what the pages show.

``python -m tests.docs.outputs docs/tutorial.md`` runs the commands of a page, and writes the numbers that they print
into what the page shows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.pages import ROOT, Block, blocks_of, text_of, train_script
from tests.launches import environment

_NUMBER = re.compile(r"\b(?:\d(?:[\d,.]*\d)?(?:e-?\d+)?|nan)(?!\w)")
# These are the same on all machines: how many ops, casts and steps a summary tells.
_COUNTS = re.compile(r"\b(?:ops|casts) [^;]*|\d+ of \d+ steps skipped")


def at_hand(folder: Path) -> Path:
    """Give a folder what a reader has at hand: a script of his own, and the examples."""
    (folder / "train.py").write_text(train_script(), encoding="utf-8")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def run_in_shell(block: Block, folder: Path) -> tuple[int, str]:
    """Run a block of commands in a folder; return the exit code and all that was printed."""
    # Commands find the Python of this environment, and the tree.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code], cwd=at_hand(folder), timeout=600, text=True,
        env={**environment(), "PATH": path, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def is_shown(shown: str, printed: str) -> bool:
    """Whether words stand in what was printed, one after the other; ``...`` stands for any.

    Numbers may differ, but for counts. Line breaks may differ.
    """
    found = _match(shown, printed)
    return found is not None and _COUNTS.findall(" ".join(shown.split())) == _COUNTS.findall(
        " ".join(_filled(shown, found).split())
    )


def renewed(shown: str, printed: str) -> str:
    """Return what a page shows, with the numbers that were printed. ValueError: other words were printed."""
    found = _match(shown, printed)
    if found is None:
        raise ValueError(f"the page shows\n{shown}\nand it prints\n{printed}")
    return _filled(shown, found)


def _match(shown: str, printed: str) -> re.Match[str] | None:
    parts = []
    for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE):
        pieces = _NUMBER.split(" ".join(part.split()))
        parts.append(f"({_NUMBER.pattern})".join(map(re.escape, pieces)))
    return re.search(".*?".join(parts), " ".join(printed.split()))


def _filled(shown: str, found: re.Match[str]) -> str:
    numbers = iter(found.groups())
    return _NUMBER.sub(lambda _: next(numbers), shown)


def main(page: str) -> None:
    """Renew the numbers of a page."""
    text = text_of(page)
    for block in blocks_of(page):
        if block.language == "bash" and block.left_out is None and block.shown is not None:
            with tempfile.TemporaryDirectory() as folder:
                _, printed = run_in_shell(block, Path(folder))
            text = text.replace(block.shown, renewed(block.shown, printed))
    (ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
