"""Rows as a table that people read."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["as_table", "counted"]


def as_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """Return a table as text, with each column as wide as its widest cell.

    Args:
        title: The line above the table.
        headings: The columns' names.
        rows: The cells, as many in each row as there are columns.
        numbers: The number of columns at the end that are aligned at the right.
    """
    if not rows:
        return f"{title}: nothing\n"
    lines = [headings, *rows]
    columns = []
    for number, cells in enumerate(zip(*lines, strict=True)):
        align = str.ljust if number < len(headings) - numbers else str.rjust
        columns.append([align(cell, max(map(len, cells))) for cell in cells])
    return "\n".join([title, *("  ".join(line).rstrip() for line in zip(*columns, strict=True)), ""])


def counted(number: int, what: str) -> str:
    """Return a number and a noun, such as ``"1 skip"`` or ``"2 skips"``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
