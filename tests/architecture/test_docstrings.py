"""What a public function of several parameters takes is written down: its docstring has `Args:`."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"

# Its methods take what those of `Handle` take, which have the sections. The tree `apex` has Apex's own documentation.
EXCEPTIONS = ("autoamp.NoOpHandle.", "autoamp.compat.")


def found_at(dotted: str) -> Any:
    """Return what a page of the reference documents."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise AssertionError(dotted)


def public_functions() -> Iterator[tuple[str, FunctionType, str]]:
    """Yield each documented function and each public method of a documented class, with its own and inherited text."""
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted(REFERENCE.glob("*.md")))
    for dotted in re.findall(r"^::: (autoamp\.\S+)", pages, re.MULTILINE):
        found = found_at(dotted)
        if isinstance(found, FunctionType):
            yield dotted, found, found.__doc__ or ""
        for name, value in vars(found).items() if isinstance(found, type) else ():
            method = inspect.unwrap(getattr(value, "__func__", value))
            if isinstance(method, FunctionType) and not name.startswith("_"):
                texts = [getattr(base, name).__doc__ or "" for base in found.__mro__ if hasattr(base, name)]
                yield f"{dotted}.{name}", method, "".join(texts)


def test_public_functions_say_what_they_take() -> None:
    checked, found = 0, []
    for dotted, function, text in public_functions():
        taken = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
        if len(taken) > 1 and function.__module__.startswith("autoamp.") and not dotted.startswith(EXCEPTIONS):
            checked += 1
            found += [] if "Args:\n" in text else [f"{dotted}({', '.join(taken)})"]
    assert found == []
    assert checked > 60
