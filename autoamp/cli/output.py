"""Tables as lines of text, and messages on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["aligned", "say"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with each column as wide as its widest cell. All rows have as many cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def say(line: str) -> None:
    """Write a line to stderr, with ``autoamp: `` before it. Does nothing where there is no stderr."""
    try:
        sys.stderr.write(line if line.startswith("autoamp: ") else f"autoamp: {line}")
        sys.stderr.write("\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # There is no stderr, or it is closed.
        pass
