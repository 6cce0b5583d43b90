"""Replacements that pass calls through, and what they are put in place of."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

from autoamp.core import imitate

NOTHING: tuple[str, ...] = ()


def replacement_of(original: Any, module: str = "shelf", qualname: str = "work") -> Any:
    """A replacement that passes calls through, and looks like its original as this package's do."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return imitate(replacement, original, module, qualname)


class Base:
    def method(self) -> str:
        return "base"

    @staticmethod
    def static(value: int) -> int:
        return value

    @classmethod
    def of_class(cls, value: int) -> tuple[type, int]:
        return cls, value


class Derived(Base):
    pass


def package(folder: Path, name: str, **files: str) -> None:
    """Write a package with these files; ``init`` is its own."""
    (folder / name).mkdir()
    for file, text in {"init": "", **files}.items():
        (folder / name / f"{'__init__' if file == 'init' else file}.py").write_text(text)


def module_with(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module
    return module
