"""List files that installed packages ship for their own ops, found by the entry point group `autoamp.lists`."""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GROUP", "PackageList", "find_package_lists"]

GROUP = "autoamp.lists"


@dataclass(frozen=True)
class PackageList:
    """What one entry point names.

    Attributes:
        owner: The distribution and its version.
        package: The package that the entry point names, with dots.
    """

    owner: str
    package: str

    @property
    def file(self) -> Path:
        """The `autoamp.toml` in the package's folder; the package is not imported. OSError: there is no such folder."""
        top, *rest = self.package.split(".")
        try:
            spec = importlib.util.find_spec(top)
        except ValueError:
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f"no package {top!r} is installed")
        return Path(spec.submodule_search_locations[0], *rest, "autoamp.toml")


def find_package_lists() -> tuple[PackageList, ...]:
    """Return what the entry points of this Python's path name, in the order of the distributions' names."""
    return _found_on(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _found_on(path: tuple[str, ...]) -> tuple[PackageList, ...]:
    # Imported here: it takes some milliseconds, and the first handle alone needs it.
    from importlib.metadata import entry_points

    found = {PackageList(_owner(entry), entry.module) for entry in entry_points(group=GROUP)}
    return tuple(sorted(found, key=lambda one: (one.owner, one.package)))


def _owner(entry: object) -> str:
    dist = getattr(entry, "dist", None)
    return "an unknown package" if dist is None else f"{dist.name} {dist.version}"
