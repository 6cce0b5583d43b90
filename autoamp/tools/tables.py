"""Rows as a table that people read, and names and numbers in its sentences."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence

# In columns. Texts are folded where the terminal is narrower than the table.
_WIDTH = 140


def as_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """Return a table as text.

    Args:
        title: The line above the table.
        headings: The columns' names.
        rows: The cells, as many in each row as there are columns.
        numbers: The number of columns at the end that are aligned at the right, with a word of the heading a line.
    """
    if not rows:
        return f"{title}: nothing\n"
    # These take some 50 ms to import.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    texts = len(headings) - numbers
    for heading in headings[:texts]:
        table.add_column(heading, overflow="fold")
    for heading in headings[texts:]:
        table.add_column("\n".join(heading.split()), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=max(_WIDTH, shutil.get_terminal_size().columns)).print(table)
    return text.getvalue()


def first_of(names: Sequence[str], most: int) -> str:
    """Return so many names, and how many others there are: ``"a, b and 3 more"``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def placed(what: str, module: str | None, location: str | None) -> str:
    """Return what is called with where that is: ``"mul in module 1 at net.py:7"``."""
    parts = [what, f"in module {module}" if module else "", f"at {location}" if location else ""]
    return " ".join(filter(None, parts))


def counted(number: int, what: str) -> str:
    """Return a number and a noun, such as ``"1 skip"`` or ``"2 skips"``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
