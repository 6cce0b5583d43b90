"""Tables as lines of text, messages on stderr, and errors of the library in words of the command line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoamp.errors import UsageError


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with each column as wide as its widest cell. All rows have as many cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def writable(option: str, name: str) -> Path:
    """Return the absolute path of a file that an option names. UsageError: it cannot be written."""
    path = Path(name).absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{option} {name!r} cannot be written: give a file in a directory that exists")
    return path


def is_python(word: str) -> bool:
    """Whether a word of a command line is Python's own command, such as ``python3.11``."""
    return re.fullmatch(r"python[\d.]*(\.exe)?", os.path.basename(word)) is not None


def as_typed(error: Exception, names: Mapping[str, str]) -> str:
    """Return the message of an error of the library, with its arguments as the user gave them.

    Args:
        error: It names arguments of functions, such as ``device_type='gpu'``.
        names: What stands in the place of ``device_type=``, by argument: ``"--device-type "``.
    """

    def typed(found: re.Match[str]) -> str:
        return f"{names[found[1]].strip(' =')}:" if found[2] else names[found[1]]

    return re.sub(rf"\b({'|'.join(names)})=(:?)(?:torch\.)?", typed, str(error))


def say(line: str, *, wrong: bool = False) -> None:
    """Write a line to stderr, with ``autoamp: `` before it. Does nothing where there is no stderr.

    Args:
        line: One, or several.
        wrong: Whether it tells of an error, which shows in color.
    """
    try:
        sys.stderr.write(f"{_styled('autoamp:', '1;31' if wrong else '1;36', sys.stderr)} {line}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # There is no stderr, or it is closed.
        pass


def show(heading: str) -> None:
    """Write a heading to stdout."""
    sys.stdout.write(f"{_styled(heading, '1', sys.stdout)}\n")


def _styled(text: str, codes: str, stream: Any) -> str:
    """Return a text in the colors of these codes on a terminal; the text alone elsewhere, or with NO_COLOR set."""
    shown = stream.isatty() or os.environ.get("FORCE_COLOR")
    return f"\x1b[{codes}m{text}\x1b[0m" if shown and not os.environ.get("NO_COLOR") else text
