"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "kernels" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
)
# What a fence may say: code that runs, lists that are read, and what programs print.
LANGUAGES = ("bash", "python", "text", "toml")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHOWN = re.compile(r"\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"\A# not run here: (\S.+)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: Such as ``docs/lists.md``.
        line: The 1-based line of its fence.
        language: One of `LANGUAGES`.
        code: What is in it.
        shown: What the page says that it prints: the text that follows it with nothing between; None where none does.
    """

    page: str
    line: int
    language: str
    code: str
    shown: str | None = None

    @property
    def left_out(self) -> str | None:
        """Why it is not run, as its first line says to readers; None where it is."""
        found = _NOT_RUN.match(self.code)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    """Return a page as it is in the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = text_of(page)
    for match in _FENCE.finditer(text):
        shown = _SHOWN.match(text, match.end())
        yield Block(
            page, text.count("\n", 0, match.start()) + 1, match[1], match[2], None if shown is None else shown[1]
        )


def prose_of(page: str) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", text_of(page))


BLOCKS = tuple(block for page in PAGES for block in blocks_of(page))


def train_script() -> str:
    """Return the tutorial's ``train.py``, which commands of other pages run too."""
    (script,) = [block.code for block in BLOCKS if block.code.startswith("# train.py\n")]
    return script
