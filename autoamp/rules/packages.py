"""List files that installed packages ship for their own ops, found by the entry point group `autoamp.lists`.

autoamp itself ships lists for libraries that have none: such an entry point has the name of the library.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "autoamp.lists"


@dataclass(frozen=True)
class PackageList:
    """What one entry point names.

    Attributes:
        owner: The distribution and its version.
        package: The package that the entry point names, with dots.
        library: The package that the list is about.
    """

    owner: str
    package: str
    library: str

    @property
    def file(self) -> Path:
        """The `autoamp.toml` in the package's folder; the package is not imported. OSError: there is no such folder."""
        top, *rest = self.package.split(".")
        folder = _folder_of(top)
        if folder is None:
            raise FileNotFoundError(f"no package {top!r} is installed")
        return Path(folder, *rest, "autoamp.toml")


def find_package_lists() -> tuple[PackageList, ...]:
    """Return what the entry points of this Python's path name, in the order of the distributions' names."""
    return _found_on(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _found_on(path: tuple[str, ...]) -> tuple[PackageList, ...]:
    # Imported here: it takes some milliseconds, and the first handle alone needs it.
    from importlib.metadata import entry_points

    found = {_package_list(entry) for entry in entry_points(group=GROUP)}
    found = {one for one in found if one.library == one.package.partition(".")[0] or _folder_of(one.library)}
    return tuple(sorted(found, key=lambda one: (one.owner, one.package)))


def _package_list(entry: EntryPoint) -> PackageList:
    dist = getattr(entry, "dist", None)
    owner = "an unknown package" if dist is None else f"{dist.name} {dist.version}"
    top = entry.module.partition(".")[0]
    return PackageList(owner, entry.module, entry.name if top == "autoamp" else top)


def _folder_of(package: str) -> str | None:
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        # A module that was made by hand.
        spec = None
    return spec.submodule_search_locations[0] if spec is not None and spec.submodule_search_locations else None
