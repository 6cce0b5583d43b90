"""Rows as a table that people read, by rich where it is installed, and as CSV."""

from __future__ import annotations

import csv
import importlib.util
import io
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["as_csv", "as_table", "counted"]

# Longer texts in cells are folded where the terminal is narrow.
_TEXT = 24


def as_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """Return a table as text.

    Args:
        title: What stands above it.
        headings: The columns' names.
        rows: The cells, as many in each row as there are columns.
        numbers: How many columns at the end are numbers, which are aligned at the right.
    """
    if not rows:
        return f"{title}: nothing\n"
    if importlib.util.find_spec("rich") is None:
        return _plain(title, headings, rows, numbers)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table, needed = Table(title=title, title_justify="left"), 1
    for number, heading in enumerate(headings):
        right = number >= len(headings) - numbers
        longest = max(len(row[number]) for row in rows)
        least = max(longest if right else min(longest, _TEXT), *map(len, heading.split()))
        # Numbers stay whole, below a word of the heading a line; texts are folded.
        heading = "\n".join(heading.split()) if right else heading
        justify: Any = "right" if right else "left"
        table.add_column(heading, justify=justify, min_width=least, no_wrap=right, overflow="fold")
        # What is around a cell takes 3.
        needed += least + 3
    for row in rows:
        table.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=max(100, needed, shutil.get_terminal_size((140, 24)).columns)).print(table)
    return text.getvalue()


def counted(number: int, what: str) -> str:
    """Return a number with what is counted, in the plural unless it is one."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _plain(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> str:
    cells = [list(headings), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    first_number = len(headings) - numbers
    lines = [
        "  ".join(
            cell.rjust(width) if number >= first_number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([title, *lines, ""])


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return rows as CSV with a line of headings.

    Args:
        rows: Mappings by column; one in a cell becomes ``key=value`` with spaces between.
        columns: Which columns, in this order.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue()


def _cell(value: Any) -> Any:
    return " ".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, Mapping) else value
