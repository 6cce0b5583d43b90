"""The public API as a list: every name in the reference, with its parameters, defaults and annotations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.docs.pages import documented, found_at

# After a change on purpose: python -m tests.integration.test_public_api
LISTED = Path(__file__).with_name("public_api.txt")


def parameters(function: Any) -> str:
    """Return a function's parameters as they are written, and its return annotation."""

    def of(annotation: Any) -> str:
        return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", repr(annotation))

    def one(parameter: inspect.Parameter) -> str:
        shown = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        if parameter.annotation is not parameter.empty:
            shown += f": {of(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            shown += f" = {re.sub(r' at 0x[0-9a-f]+', '', repr(parameter.default))}"
        kind = parameter.kind.name.lower() if "ONLY" in parameter.kind.name else ""
        return f"{shown} ({kind})" if kind else shown

    signature = inspect.signature(function)
    returned = "" if signature.return_annotation is signature.empty else f" -> {of(signature.return_annotation)}"
    return f"({', '.join(map(one, signature.parameters.values()))}){returned}"


def members(kind: type) -> dict[str, Any]:
    """Return what the package defines in a class and its bases: its public names, and ``__init__``."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("autoamp"):
            public = {name: value for name, value in vars(base).items() if not name.startswith("_")}
            init = vars(base).get("__init__")
            # `typing` gives each protocol an `__init__` of its own.
            if inspect.isfunction(init) and init.__module__ != "typing":
                public["__init__"] = init
            found.update(public)
    return dict(sorted(found.items()))


def described() -> Iterator[str]:
    """Yield a line for each public name, and for each member of a public class."""
    # Without the package of kernels, which may not be built here.
    for name in [name for name in documented() if name.startswith("autoamp.")]:
        value = found_at(name)
        if not isinstance(value, type):
            yield f"{name}{parameters(value)}" if callable(value) else f"{name}: {type(value).__name__}"
            continue
        yield f"class {name}"
        for member, found in members(value).items():
            bare = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
            yield f"    {member}{parameters(bare)}" if inspect.isfunction(bare) else f"    {member}"


def test_names_and_signatures_are_those_of_the_list() -> None:
    listed, found = LISTED.read_text(encoding="utf-8").splitlines(), list(described())
    gone, new = sorted(set(listed) - set(found)), sorted(set(found) - set(listed))
    remedy = "for a change on purpose run `python -m tests.integration.test_public_api`"
    assert found == listed, "\n".join([*(f"- {line}" for line in gone), *(f"+ {line}" for line in new), remedy])


if __name__ == "__main__":
    LISTED.write_text("".join(f"{line}\n" for line in described()), encoding="utf-8")
