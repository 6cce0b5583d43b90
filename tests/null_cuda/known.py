"""What is known to differ, from `known_differences.toml`."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

TABLES: dict[str, list[dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("known_differences.toml").read_text(encoding="utf-8")
)


@dataclasses.dataclass(frozen=True)
class Known:
    """An entry: what it is about, which quantities differ there, and why.

    Attributes:
        where: For each name of a comparison the values that the entry is about; a name that is absent is about all.
        what: The quantities.
        reason: Why.
    """

    where: dict[str, tuple[str, ...]]
    what: tuple[str, ...]
    reason: str

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Known:
        lists = {name: (value,) if isinstance(value, str) else tuple(value) for name, value in entry.items()}
        (reason,) = lists.pop("reason")
        return cls(what=lists.pop("what"), where=lists, reason=reason)

    def covers(self, **names: str) -> bool:
        return all(names[name] in values for name, values in self.where.items())


def known(table: str) -> list[Known]:
    """Return the entries of a table of the file."""
    return [Known.of(entry) for entry in TABLES.get(table, [])]


def verdict(table: str, found: dict[str, str], **names: str) -> list[str]:
    """Return what is wrong: differences that are not known, and known ones that are gone."""
    expected = {what: entry.reason for entry in known(table) if entry.covers(**names) for what in entry.what}
    new = [f"{what}: {text}" for what, text in found.items() if what not in expected]
    gone = [
        f"{what} differs no more; take it out of known_differences.toml ({reason})"
        for what, reason in expected.items()
        if what not in found
    ]
    return new + gone
