"""What a public function of several parameters takes is written down: its docstring has `Args:`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType

from tests.docs.pages import documented, found_at

# Its methods take what those of `Handle` take, which have the sections. The tree `apex` has Apex's own documentation.
EXCEPTIONS = ("autoamp.NoOpHandle.", "autoamp.compat.")


def public_functions() -> Iterator[tuple[str, FunctionType, str]]:
    """Yield each documented function and each public method of a documented class, with its own and inherited text."""
    for dotted in [name for name in documented() if name.startswith("autoamp.")]:
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
