"""Tables as lines of text, and messages on stderr."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

__all__ = ["COLUMNS", "aligned", "packed", "say"]

COLUMNS = 80
"""How wide a summary is at most, so that it stays whole in any terminal."""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with each column as wide as its widest cell. All rows have as many cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def packed(head: str, parts: Sequence[str], between: str) -> str:
    """Return parts in lines of at most `COLUMNS`, the later ones indented. A line ends where a part does, if it can.

    Args:
        head: What the first line begins with.
        parts: What is told, in its order.
        between: What stands between two parts, such as ``"; "``.
    """
    lines, indent = [head], " " * 2
    for place, part in enumerate(parts):
        text = part + (between.rstrip() if place < len(parts) - 1 else "")
        gap = "" if lines[-1] in (head, indent) else " "
        if len(lines[-1]) + len(gap) + len(text) <= COLUMNS:
            lines[-1] += gap + text
        elif gap and len(indent) + len(text) <= COLUMNS:
            lines.append(indent + text)
        else:
            lines[-1:] = textwrap.wrap(lines[-1] + gap + text, COLUMNS, subsequent_indent=indent,
                                       break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return "\n".join(lines)


def say(line: str) -> None:
    """Write a line to stderr, with ``autoamp: `` before it. Does nothing where there is no stderr."""
    try:
        sys.stderr.write(line if line.startswith("autoamp: ") else f"autoamp: {line}")
        sys.stderr.write("\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # There is no stderr, or it is closed.
        pass
