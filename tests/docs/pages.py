"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

# A comment above a block, which readers do not see and do not copy, says why it is not run.
_FENCE = re.compile(r"^(?:<!-- not run here: (\S[^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHOWN = re.compile(r"\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: Such as ``docs/lists.md``.
        line: The 1-based line where it begins.
        language: One of `LANGUAGES`.
        code: What is in it.
        left_out: Why it is not run; None where it is.
        shown: What the page says that it prints: the text that follows it with nothing between; None where none does.
    """

    page: str
    line: int
    language: str
    code: str
    left_out: str | None = None
    shown: str | None = None

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
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match[2], match[3], match[1], None if shown is None else shown[1])


def prose_of(page: str) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", text_of(page))


def documented() -> list[str]:
    """Return the names that have a place in the reference."""
    texts = [text_of(page) for page in PAGES if page.startswith("docs/reference/")]
    return sorted({name for text in texts for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)})


def found_at(name: str) -> Any:
    """Return what a dotted name of the reference means."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


BLOCKS = tuple(block for page in PAGES for block in blocks_of(page))


def train_script() -> str:
    """Return the tutorial's ``train.py``, which commands of other pages run too."""
    (script,) = [block.code for block in BLOCKS if block.code.startswith("# train.py\n")]
    return script
