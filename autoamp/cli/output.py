"""Lines and tables on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["aligned", "say"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, its columns of one width each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def say(line: str) -> None:
    """Tell the user a line, on stderr."""
    try:
        sys.stderr.write(line if line.startswith("autoamp: ") else f"autoamp: {line}")
        sys.stderr.write("\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # No stderr, or a closed one: nobody is listening.
        pass
