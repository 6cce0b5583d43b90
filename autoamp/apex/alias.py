"""The import finder that serves `apex` from this package: the whole of it, or what an installed `apex` lacks.

`_ApexFinder` finds `apex`, what lies below it, `amp_C` and `apex_C` in our files. A module that we lack, such as
`apex.transformer`, it finds in the installed `apex` that it hides. Beside an installed `apex` that lacks `amp` it finds
our modules below `apex` where the installed one has none of that name. Errors of the installed `apex` get the remedy.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoamp.apex.levels import LevelName, check_level
from autoamp.apex.missing import missing_names, remedy_for
from autoamp.core import OnNonfinite, Settings
from autoamp.errors import UsageError
from autoamp.moved import SameModule, same_as

# Of the last Apex that had `apex.amp`.
APEX_VERSION = "0.1"

_HERE = Path(__file__).parent
_TOP_LEVEL = ("apex", "amp_C", "apex_C")
# ``python -m`` would warn that it was imported already.
_LATER = ("apex.parallel.multiproc",)
# A package of ours that Apex does not have, and one that it has beside `apex`.
_NOT_IN_APEX = ("amp_C", "fastai1")
_REMEDY = "autoamp: a module of the installed apex cannot be imported here. Build apex for this torch"
_HIDE = f"{_REMEDY}, or hide it: autoamp run --shadow-apex, or install_as_apex(shadow=True)"


@dataclass(frozen=True)
class Options:
    """What the alias's ``initialize`` and ``init`` take where the program says nothing.

    Attributes:
        dtype: The half dtype. Apex knew fp16 alone, so fp16 is the default, on a CPU too.
        device_type: As for `autoamp.init`.
        lists: List sets and files; ``"apex"`` is always the first.
        opt_level: The level of an ``initialize`` that names none.
        loss_scale: The loss scale of an ``initialize`` that names none; None leaves it to the level.
        trace_overflow: Whether skipped steps are explained.
        on_nonfinite: As for `autoamp.init`.
    """

    dtype: torch.dtype = torch.float16
    device_type: str | None = None
    lists: tuple[Any, ...] = ("apex",)
    opt_level: LevelName = "O1"
    loss_scale: str | float | None = None
    trace_overflow: bool = False
    on_nonfinite: OnNonfinite = "warn"


class _ApexFinder(importlib.abc.MetaPathFinder):
    """Finds our modules and those of an installed `apex`, and says of a missing one what to use instead.

    It comes before all other finders.

    Args:
        chosen: What `install_as_apex` was given. None where only modules of the installed `apex` are found.
        hides: Whether our modules go before those of the installed `apex`, not after them.
    """

    def __init__(self, chosen: Options | None, hides: bool) -> None:
        self.options = chosen
        self.hides = hides
        self._hidden: dict[str, types.ModuleType] = {}
        self._real: list[str] = []

    def install(self) -> None:
        """Take part in imports."""
        spec = _real_spec()
        self._real = [] if spec is None else list(spec.submodule_search_locations or ())
        if self.hides:
            # None forbids the import; it was put there by somebody who meant it.
            names = [name for name in _names_of_apex(sys.modules) if sys.modules[name] is not None]
            self._hidden = {name: sys.modules.pop(name) for name in names}
        sys.meta_path.insert(0, self)
        if self.options is not None and "apex" in sys.modules and not self.hides:
            _import_added()

    def uninstall(self) -> None:
        """Undo `install`. Our modules have left ``sys.modules``."""
        sys.meta_path.remove(self)
        sys.modules.update(self._hidden)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec on our file, on one in a folder that the program added, or on that of the installed `apex`.

        Raises:
            ModuleNotFoundError: A module that is not provided is imported. One that is only looked for is None.
        """
        top, *below = fullname.split(".")
        if top not in (_TOP_LEVEL if self.hides else ("apex",)):
            return None
        if self.hides:
            folders = [*(path or ()), *(os.path.join(folder, *below[:-1]) for folder in self._real)]
            found = _our_spec(fullname) or importlib.machinery.PathFinder.find_spec(fullname, folders)
        else:
            ours = _our_spec(fullname) if below and self.options is not None else None
            # Below a package of ours there is nothing of the installed one.
            is_below_ours = _is_ours(sys.modules.get(fullname.rpartition(".")[0]))
            found = ours if is_below_ours else _real_spec(fullname, path) or ours
        if found is not None and found.loader is not None and self._real and not isinstance(found.loader, _OurLoader):
            found.loader = _RealLoader(found.loader)
        if found is None and below and self.options is not None and _is_import(sys._getframe(1)):
            message = f"No module named {fullname!r}: autoamp's apex does not provide it: {remedy_for(fullname)}"
            raise ModuleNotFoundError(message, name=fullname)
        return found

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Answer ``importlib.metadata.version("apex")``, unless the installed `apex` does."""
        if self.hides and (context is None or context.name is None or context.name.lower() == "apex"):
            yield _ApexDistribution()


def _our_spec(fullname: str) -> importlib.machinery.ModuleSpec | None:
    below = _HERE.joinpath(*fullname.removeprefix("apex.").split(".")) if fullname != "apex" else _HERE
    if not ((below / "__init__.py").is_file() or below.with_suffix(".py").is_file()):
        return None
    spec = importlib.util.find_spec(_our_name(fullname))
    return None if spec is None else same_as(fullname, spec, _OurLoader(spec))


def _our_name(fullname: str) -> str:
    """Return the name of the module here that is to be found by a name of Apex."""
    return f"autoamp.{fullname}" if fullname.partition(".")[0] == "apex" else f"autoamp.apex.{fullname}"


class _RealLoader(importlib.abc.Loader):
    """Imports a module of the installed `apex`; after `apex` itself, our modules that are added to it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Leave it to the module's own loader."""
        return self.loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        """Import the module, and tell the remedy where it fails."""
        # Resources and sources of the module are asked of its own loader.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        try:
            self.loader.exec_module(module)
        except Exception as error:
            finder = _installed()
            note = _REMEDY if finder is not None and finder.hides else _HIDE
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise
        if module.__name__ == "apex" and is_installed():
            # `apex.amp` was there after `import apex`.
            _import_added()


class _OurLoader(SameModule):
    """Gives a module of ours itself, and what is below it; names that it lacks are told with what to use."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Share what is below at once, so that no module is set over a name such as `apex.parallel.LARC`."""
        super().exec_module(module)
        _share(self.alias, module)


def _share(name: str, module: types.ModuleType) -> None:
    if sys.modules.setdefault(name, module) is not module:
        return
    module.__getattr__ = missing_names(name)  # type: ignore[method-assign]
    for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
        below = f"{name}.{found.name}"
        if below not in _LATER:
            _share(below, importlib.import_module(f"{module.__name__}.{found.name}"))


def _import_added() -> None:
    for name in added_to_real_apex():
        importlib.import_module(f"apex.{name}")


class _ApexDistribution(importlib.metadata.Distribution):
    """The metadata of the distribution `apex` that the alias stands for."""

    def read_text(self, filename: str) -> str | None:
        summary = "Summary: autoamp, by the name of apex"
        metadata = f"Metadata-Version: 2.1\nName: apex\nVersion: {APEX_VERSION}\n{summary}\n"
        # By the second file libraries learn which distribution a module comes from.
        return {"METADATA": metadata, "top_level.txt": "\n".join(_TOP_LEVEL)}.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return _HERE / path


def install_as_apex(
    *,
    dtype: torch.dtype | None = None,
    device_type: str | None = None,
    lists: Any = None,
    opt_level: LevelName = "O1",
    loss_scale: str | float | None = None,
    shadow: bool = False,
    trace_overflow: bool = False,
    on_nonfinite: OnNonfinite = "warn",
) -> None:
    """Let ``import apex`` find autoamp, so that programs written for Apex run unmodified.

    If an `apex` without `amp` is installed, as NVIDIA's is since May 2025, it keeps all that it has. Modules that it
    lacks, such as `apex.amp` and `apex.fp16_utils`, are added to it.

    Args:
        dtype: The half dtype. None is fp16, the only one that Apex knew, on a CPU too.
        device_type: Which device's tensors are cast; None is the current accelerator's, else ``"cpu"``.
        lists: What `autoamp.init` takes as ``lists``, on top of the set ``"apex"``.
        opt_level: The level of an ``amp.initialize`` that names none.
        loss_scale: ``"dynamic"`` or a number, for an ``amp.initialize`` that names none. None leaves it to the level.
        shadow: Whether an installed real `apex` is hidden by the alias. Modules that the alias lacks, such as
            `apex.transformer`, still come from it.
        trace_overflow: Whether skipped steps are explained; see `autoamp.init`.
        on_nonfinite: As for `autoamp.init`.

    Raises:
        UsageError: A real `apex` that has `amp` is installed or imported and ``shadow`` is False, or an argument is
            wrong. Nothing was changed.
        ListFileError: A list cannot be used. Nothing was changed.
        LossScaleError: The loss scale is no scale. Nothing was changed.
    """
    check_level(opt_level)
    listed = list(lists) if isinstance(lists, (list, tuple)) else [] if lists is None else [lists]
    half = torch.float16 if dtype is None else dtype
    chosen = Options(half, device_type, ("apex", *listed), opt_level, loss_scale, trace_overflow, on_nonfinite)
    # Every wrong argument is told now, not at the program's first call.
    Settings.from_arguments(list(chosen.lists), device_type, half, loss_scale=loss_scale, on_nonfinite=on_nonfinite)
    finder = _installed()
    if finder is not None and finder.options is not None and (finder.hides or not shadow):
        finder.options = chosen
        return
    real = real_apex()
    if real is None or shadow or "amp" in added_to_real_apex():
        uninstall()
        _ApexFinder(chosen, hides=real is None or shadow).install()
    else:
        raise UsageError(
            f"Expected no apex, or one without apex.amp, got a real apex with it ({real}). Uninstall it, or pass "
            "shadow=True to hide it"
        )


def explain_real_apex() -> None:
    """Add a note with the remedy to errors of the installed `apex` when it is imported, until `uninstall`."""
    if _installed() is None:
        _ApexFinder(None, hides=False).install()


def uninstall() -> None:
    """Undo `install_as_apex`: its modules leave ``sys.modules``, and those that it hid come back."""
    finder = _installed()
    if finder is None:
        return
    for name in _names_of_apex(sys.modules):
        module = sys.modules[name]
        # What the alias took from an apex that it hides goes too.
        if module is None or not (_is_ours(module) or finder.hides):
            continue
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        owner = sys.modules.get(parent) or sys.modules.get(f"autoamp.{parent}")
        if _is_ours(module):
            vars(module).pop("__getattr__", None)
        if owner is not None and _is_ours(owner) is not _is_ours(module) and vars(owner).get(child) is module:
            delattr(owner, child)
    for name in [name for name in sys.modules if name.startswith("autoamp.apex.amp.lists.")]:
        # A program may have changed the lists.
        del sys.modules[name]
    finder.uninstall()


def is_installed() -> bool:
    """Whether ``import apex`` finds autoamp."""
    finder = _installed()
    return finder is not None and finder.options is not None


def options() -> Options:
    """Return what `install_as_apex` was given, or the defaults."""
    finder = _installed()
    return Options() if finder is None or finder.options is None else finder.options


def real_apex() -> str | None:
    """Return where a real `apex` lies, None where there is none. A mere directory of that name is none."""
    module = sys.modules.get("apex")
    if module is not None and not _is_ours(module):
        return str(getattr(module, "__file__", None) or "already imported")
    spec = _real_spec()
    return None if spec is None else spec.origin


def added_to_real_apex() -> tuple[str, ...]:
    """Return the names of our modules that the real `apex` lacks, such as ``"amp"``, without importing it."""
    module = sys.modules.get("apex")
    spec = None if module is not None and not _is_ours(module) else _real_spec()
    path = getattr(module, "__path__", None) if spec is None else spec.submodule_search_locations
    ours = [
        found.name for found in pkgutil.iter_modules([str(_HERE)]) if found.ispkg and found.name not in _NOT_IN_APEX
    ]
    find = importlib.machinery.PathFinder.find_spec
    return tuple(name for name in ours if path is not None and find(f"apex.{name}", list(path)) is None)


def _real_spec(name: str = "apex", path: Sequence[str] | None = None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and not isinstance(finder, _ApexFinder):
            spec: importlib.machinery.ModuleSpec | None = find(name, path)
            # The spec of a namespace package, a directory without __init__.py, has no origin. No apex is one.
            if spec is not None and (spec.origin is not None or name != "apex"):
                return spec
    return None


def _installed() -> _ApexFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _ApexFinder)), None)


def _names_of_apex(names: Iterable[str]) -> list[str]:
    return [name for name in names if name in _TOP_LEVEL or name.startswith("apex.")]


def _is_ours(module: types.ModuleType | None) -> bool:
    return Path(getattr(module, "__file__", None) or os.devnull).is_relative_to(_HERE)


def _is_import(frame: types.FrameType | None) -> bool:
    """Whether a finder is asked by an import, not by ``importlib.util.find_spec``, which wants None."""
    while frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        if frame.f_code.co_name == "_find_and_load_unlocked":
            return True
        frame = frame.f_back
    return False
