"""Finds list files and sets, reads them in order, and merges them to one table.

Installed packages ship lists for their own ops, which the entry point group `autoamp.lists` names. autoamp itself ships
lists for libraries that have none: such an entry point has the name of the library.
"""

from __future__ import annotations

import functools
import importlib.resources
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources.abc import Traversable
from pathlib import Path

from autoamp.core.rules import CastTable, ListSet, RuleSource, Source, choices, did_you_mean, fail, parse_toml
from autoamp.errors import ListFileError, warn_user

ENVIRONMENT_VARIABLE = "AUTOAMP_LISTS"
PROJECT_FILE = "autoamp.toml"
_PYPROJECT = "pyproject.toml"
# So many lists may name each other in a chain: each takes some frames of Python.
_MAX_CHAIN = 50
_GROUP = "autoamp.lists"


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
        """The `autoamp.toml` in the package's folder; the package is not imported, and may not be installed."""
        top, *rest = self.package.split(".")
        return Path(_folder_of(top) or top, *rest, "autoamp.toml")


@functools.lru_cache(maxsize=1)
def find_package_lists(path: tuple[str, ...]) -> tuple[PackageList, ...]:
    """Return what the entry points of a path of Python name, in the order of the distributions' names."""
    # Imported here: it takes some milliseconds, and the first handle alone needs it.
    from importlib.metadata import entry_points

    found = set()
    for entry in entry_points(group=_GROUP):
        dist, top = getattr(entry, "dist", None), entry.module.partition(".")[0]
        owner = "an unknown package" if dist is None else f"{dist.name} {dist.version}"
        library = entry.name if top == "autoamp" else top
        if library == top or _folder_of(library):
            found.add(PackageList(owner, entry.module, library))
    return tuple(sorted(found, key=lambda one: (one.owner, one.package)))


def _folder_of(package: str) -> str | None:
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        # A module that was made by hand.
        spec = None
    return spec.submodule_search_locations[0] if spec is not None and spec.submodule_search_locations else None


def _read(path: Path, asked_by: RuleSource) -> ListSet:
    """Read and check a list file. Where it cannot be read the error names `asked_by`, which asks for it."""
    remedy = f"give the path of a list file, or a shipped set: {choices(shipped_sets())}"
    return _checked(_read_bytes(path, asked_by, repr(str(path)), remedy), str(path), False)


def _read_bytes(path: Path | Traversable, asked_by: RuleSource, name: str, remedy: str) -> bytes:
    # A pipe without a writer is waited for, and a device has no end.
    if isinstance(path, Path) and path.exists() and not (path.is_file() or path.is_dir()):
        raise ListFileError(f"{name} is no regular file; {remedy}", asked_by.path, asked_by.line)
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise ListFileError(f"{name} cannot be read ({error}); {remedy}", asked_by.path, asked_by.line) from error


@functools.lru_cache(maxsize=8)
def _checked(raw: bytes, name: str, shipped: bool) -> ListSet:
    """Check the content of a list file. Each handle reads its files again: to check what they say once is enough."""
    data, lines = parse_toml(raw, name)
    return ListSet(Source(name, Path(name).parent, shipped, lines), data, schema_needed=True)


def _read_named(ref: str, asked_by: RuleSource, folder: Path) -> ListSet:
    """Read a shipped set by its name, or a file by its path."""
    if not _is_name(ref):
        path = Path(os.path.abspath(folder / ref))
        if path.name == _PYPROJECT and path.is_file():
            return _read_pyproject(path) or fail(
                asked_by, f"{ref!r} has no table [tool.autoamp]; add it, or remove {ref!r}"
            )
        return _read(path, replace(asked_by, shipped=False))
    if ref not in (valid := shipped_sets()):
        remedy = f"Choose {choices(valid)}, or give a path: it has a separator or ends in '.toml'"
        fail(asked_by, f"list set {ref!r} is unknown; {did_you_mean(ref, valid)} {remedy}")
    return _shipped_set(ref)


@functools.cache
def _shipped_set(name: str) -> ListSet:
    """Return a set that comes with the package, whose files do not change while it runs."""
    return _checked((_shipped_folder() / f"{name}.toml").read_bytes(), f"lists/{name}.toml", True)


def _read_pyproject(path: Path) -> ListSet | None:
    """Return the set under `[tool.autoamp]`, or None where there is no such table."""
    if not path.is_file() or not os.access(path, os.R_OK):
        return None
    raw = _read_bytes(path, RuleSource(str(path), None, False), "the file", "run in another folder, or repair it")
    # An error in a file that never mentions autoamp is not ours to report.
    return _checked_pyproject(raw, str(path)) if b"autoamp" in raw else None


@functools.lru_cache(maxsize=8)
def _checked_pyproject(raw: bytes, name: str) -> ListSet | None:
    """Check the content of a pyproject.toml; None where it has no table of ours."""
    data, lines = parse_toml(raw, name)
    tool = data.get("tool")
    if not isinstance(tool, dict) or (table := tool.get("autoamp")) is None:
        return None
    source = Source(name, Path(name).parent, lines=lines, under=("tool", "autoamp"))
    if not isinstance(table, dict):
        fail(source.at(), f"tool.autoamp must be a table; got {table!r} ({type(table).__name__})")
    return ListSet(source, table)


def _discover(start: Path) -> ListSet | None:
    """Return the list set of the nearest folder, upwards from `start`, that has one."""
    for folder in (start, *start.parents):
        project, pyproject = folder / PROJECT_FILE, folder / _PYPROJECT
        found = _read_pyproject(pyproject)
        if os.path.isfile(project):
            origin, of_pyproject = RuleSource(str(project), None, False), found
            found = _read(project, origin)
            if of_pyproject is not None and _PYPROJECT not in (found.extends or ()):
                remedy = f'keep one of the two, or add extends = ["{_PYPROJECT}"] to {PROJECT_FILE}'
                fail(origin, f"the same folder has [tool.autoamp] in {pyproject}; {remedy}")
        if found is not None:
            return found
    return None


@functools.cache
def _shipped_folder() -> Traversable:
    try:
        return importlib.resources.files("autoamp.lists")
    except ModuleNotFoundError:
        # In a checkout, and in an editable install of one, there is no such package: the folder is beside autoamp/.
        return Path(__file__).resolve().parents[2] / "lists"


@functools.cache
def shipped_sets() -> tuple[str, ...]:
    """Return the names of the list sets that come with the package, sorted."""
    return tuple(sorted(file.name[:-5] for file in _shipped_folder().iterdir() if file.name.endswith(".toml")))


def located(origin: RuleSource) -> str:
    """Return where a rule stands as a path to open, with the line: that of a shipped set is where it is installed."""
    if not origin.shipped:
        return str(origin)
    # The path of a package's list is whole, and stays as it is.
    return str(replace(origin, path=str(_shipped_folder() / origin.path.removeprefix("lists/"))))


def _is_name(text: str) -> bool:
    """Whether a text is the name of a shipped set, and no path."""
    return not text.endswith(".toml") and not any(mark in text for mark in ("/", os.sep))


def _check_chain(key: str, name: str, chain: tuple[str, ...], asked_by: RuleSource) -> None:
    """Refuse a list that is in the chain of those that led to it by a key, or that makes the chain too long."""
    if name in chain:
        cycle = " -> ".join((*chain[chain.index(name) :], name))
        fail(asked_by, f"`{key}` is circular: {cycle}; remove one of these entries")
    if len(chain) >= _MAX_CHAIN:
        fail(asked_by, f"{Path(name).name!r} ends a chain of {len(chain)} lists by `{key}`; name some in one `{key}`")


@dataclass
class _Layers:
    """The tables of list sets, in the order in which they are laid over each other.

    Attributes:
        bases: The lowest, by name: shipped sets, and whatever a list extends.
        own: The own rules of each source, over all bases.
        base_chosen: Whether a source has decided on the bases, be it for none.
        opened: The names of the sources that name each other, from the first to the one at hand.
    """

    bases: dict[str, CastTable] = field(default_factory=dict)
    own: list[CastTable] = field(default_factory=list)
    base_chosen: bool = False
    opened: tuple[str, ...] = ()

    def add(self, lists: object, asked_by: RuleSource, folder: Path) -> None:
        """Add a source of any kind that `load_table` takes; relative paths start at `folder`."""
        match lists:
            case CastTable():
                self.base_chosen = True
                self.own.append(lists)
            case str() if _is_name(lists):
                self.add_base(lists, asked_by, folder, ())
            case str() | os.PathLike():
                found = _read_named(os.path.join(folder, os.fsdecode(lists)), asked_by, folder)
                _check_chain("lists", found.source.name, self.opened, asked_by)
                self.add_own(found)
            case Mapping():
                self.add_own(ListSet(Source(asked_by.path, folder), lists))
            case list() | tuple():
                for item in lists:
                    self.add(item, asked_by, folder)
            case _:
                remedy = "give a shipped set's name, a path, a mapping, a CastTable, or a list of those"
                fail(asked_by, f"{lists!r} ({type(lists).__name__}) is not a list set; {remedy}")

    def add_own(self, found: ListSet) -> None:
        """Add what a file or mapping names and extends, then its own rules."""
        self.opened = (*self.opened, found.source.name)
        for item, ref in enumerate(found.lists):
            self.add(ref, found.source.at("lists", item=item), found.source.folder)
        self.opened = self.opened[:-1]
        self.base_chosen |= found.extends is not None
        for item, ref in enumerate(found.extends or ()):
            self.add_base(ref, found.source.at("extends", item=item), found.source.folder, (found.source.name,))
        self.own.append(found.own)

    def add_base(self, ref: str, asked_by: RuleSource, folder: Path, chain: tuple[str, ...]) -> None:
        """Add a set to the bases, and below it what it extends; one that is there already keeps its place."""
        self.base_chosen = True
        found = _read_named(ref, asked_by, folder)
        name = found.source.name
        _check_chain("extends", name, chain, asked_by)
        if name not in self.bases:
            for key, others in (("extends", found.extends or ()), ("lists", found.lists)):
                for item, other in enumerate(others):
                    self.add_base(other, found.source.at(key, item=item), found.source.folder, (*chain, name))
            self.bases[name] = found.own


def load_table(
    lists: object = None,
    *,
    base: str = "default",
    device_type: str | None = None,
    start: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> CastTable:
    """Find, read, check and merge every list set that applies, into one table.

    Names choose the base, files edit it. Sources, the later over the earlier: `[tool.autoamp]` of the nearest
    pyproject.toml or an `autoamp.toml`, found upwards from `start`; `AUTOAMP_LISTS` in `environ` (names or paths,
    separated by `os.pathsep`); `lists`. Shipped sets that any of them names, and whatever any of them extends, lie
    below, each once; `base` does where there is none of these. A `CastTable` and an `extends = []` keep `base` out.
    The lists of installed packages lie right over the base, where there is any.

    Args:
        lists: A shipped set's name, a path, a mapping with a list file's keys, a `CastTable`, or a list of those.
        base: The shipped set to build on where no source chooses one.
        device_type: The type of the devices whose tensors are cast: rules that are limited to others are left out. By
            default no rule is.
        start: The folder where the search begins; by default the current one.
        environ: By default `os.environ`.

    Raises:
        ListFileError: With file, line and remedy, for anything in any source that cannot be used.
    """
    layers = _Layers()
    here = Path.cwd()
    if (found := _discover(here / start if start else here)) is not None:
        layers.add_own(found)
    paths = (os.environ if environ is None else environ).get(ENVIRONMENT_VARIABLE, "")
    if paths:
        origin = RuleSource(ENVIRONMENT_VARIABLE, None, False)
        layers.add([item for item in paths.split(os.pathsep) if item], origin, here)
    if lists is not None:
        layers.add(lists, RuleSource("lists=", None, False), here)
    bases = layers.bases.values() if layers.base_chosen else (shipped_table(base, device_type),)
    packages = (table for _, table in package_tables()) if bases else ()
    return _merged((*bases, *packages, *layers.own), device_type)


def package_tables() -> list[tuple[PackageList, CastTable]]:
    """Return the lists that installed packages ship. One that cannot be used is warned of, and left out."""
    found = []
    for package in find_package_lists(tuple(sys.path)):
        try:
            found.append((package, _read_package(package)))
        except ListFileError as error:
            warn_user(f"the cast list of {package.owner} is ignored: {error}")
    return found


def _read_package(package: PackageList) -> CastTable:
    """Read what a package ships. ListFileError: it cannot be read, is wrong, or is about ops of others."""
    path, remedy = package.file, f"put it into the folder of the package that the entry point of {_GROUP!r} names"
    raw = _read_bytes(path, RuleSource(_GROUP, None, True), f"the autoamp.toml of {package.package!r}", remedy)
    found = _checked(raw, str(path), True)
    if found.extends is not None:
        fail(found.source.at("extends"), "a package's list cannot have `extends`; remove it")
    own = (f"{package.library}.", "torch.ops.")
    names = [(rule.target, rule.origin) for rule in found.own.rules]
    for name, origin in (*names, *((rule.pattern, rule.origin) for rule in found.own.modules)):
        if not name.startswith(own):
            fail(origin, f"{name!r} is not a name of this package; its names begin with {choices(own)}")
    return found.own


@functools.cache
def shipped_table(name: str, device_type: str | None = None) -> CastTable:
    """Return one shipped set with what it extends, and nothing of any project; these do not change in a process.

    Args:
        name: The set's name.
        device_type: As for `load_table`.

    Raises:
        ListFileError: There is no such set.
    """
    if not _is_name(name):
        fail(RuleSource("base=", None, False), f"{name!r} is no name of a shipped set; give a file to lists=")
    layers = _Layers()
    layers.add_base(name, RuleSource("base=", None, False), Path(), ())
    return _merged(layers.bases.values(), device_type)


def half_model_table(table: CastTable, device_type: str | None = None) -> CastTable:
    """Return the rules that are in force inside half models: the set `o2` in place of the shipped sets of a table.

    Args:
        table: What `load_table` returned. The rules of packages and of the user stay over the set. Where it has no
            shipped set, as with ``extends = []``, there is none below either.
        device_type: As for `load_table`.
    """
    of_sets = {f"lists/{name}.toml" for name in shipped_sets()}
    own = CastTable(
        tuple(rule for rule in table.rules if not (rule.origin.shipped and rule.origin.path in of_sets)),
        table.modules,
        tuple(name for name in table.sources if name not in of_sets),
    )
    base = shipped_table("o2", device_type) if of_sets.intersection(table.sources) else CastTable()
    return base.overlaid(own)


def _merged(layers: Iterable[CastTable], device_type: str | None) -> CastTable:
    """Lay tables over each other, the later over the earlier."""
    table = CastTable()
    for layer in layers:
        # Limits come first: a rule for another device type must not replace an earlier rule.
        rules = (rule for rule in layer.rules if not (device_type and rule.devices) or device_type in rule.devices)
        table = table.overlaid(replace(layer, rules=tuple(rules)))
    return table
