"""The import finder that serves `apex`, `amp_C` and `apex_C` from this package.

The three names are looked up in our own files; everything below `apex` is then found by Python's own machinery, since
`apex` is an ordinary package with a directory. So each module has its own entry in ``sys.modules`` and a true spec.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoamp.compat.missing import remedy_for
from autoamp.errors import UsageError
from autoamp.levels import check_level
from autoamp.runtime import Settings

__all__ = ["APEX_VERSION", "Options", "install_as_apex", "is_installed", "options", "uninstall"]

# Of the last Apex that had `apex.amp`.
APEX_VERSION = "0.1"

_HERE = Path(__file__).parent
_FILES = {"apex": _HERE / "apex" / "__init__.py", "amp_C": _HERE / "amp_C.py", "apex_C": _HERE / "apex_C.py"}


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
    """

    dtype: torch.dtype = torch.float16
    device_type: str | None = None
    lists: tuple[Any, ...] = ("apex",)
    opt_level: str = "O1"
    loss_scale: str | float | None = None
    trace_overflow: bool = False


class _ApexFinder:
    """Answers for the three top-level names, and says of a missing module below them what to use instead."""

    def __init__(self, chosen: Options) -> None:
        self.options = chosen
        self.shadowed: dict[str, types.ModuleType] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec on our file; see `importlib.abc.MetaPathFinder`.

        Raises:
            ModuleNotFoundError: A module that is not provided is imported. One that is only looked for is None.
        """
        file = _FILES.get(fullname)
        if file is not None:
            where = [str(file.parent)] if file.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=where)
        if not fullname.startswith("apex.") or importlib.machinery.PathFinder.find_spec(fullname, path) is not None:
            return None
        if _is_import(sys._getframe(1)):
            message = f"No module named {fullname!r}: autoamp's apex does not provide it: {remedy_for(fullname)}"
            raise ModuleNotFoundError(message, name=fullname)
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Answer ``importlib.metadata.version("apex")``."""
        if context is None or context.name is None or context.name.lower() == "apex":
            yield _ApexDistribution()

    def invalidate_caches(self) -> None:
        """Nothing is cached."""


class _ApexDistribution(importlib.metadata.Distribution):
    """The metadata of the distribution `apex` that the alias stands for."""

    def read_text(self, filename: str) -> str | None:
        if filename in ("METADATA", "PKG-INFO"):
            return (
                f"Metadata-Version: 2.1\nName: apex\nVersion: {APEX_VERSION}\nSummary: autoamp, by the name of apex\n"
            )
        # By this libraries learn which distribution a module comes from.
        return "\n".join(_FILES) if filename == "top_level.txt" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return _HERE / path


def install_as_apex(
    *,
    dtype: torch.dtype | None = None,
    device_type: str | None = None,
    lists: Any = None,
    opt_level: str = "O1",
    loss_scale: str | float | None = None,
    shadow: bool = False,
    trace_overflow: bool = False,
) -> None:
    """Let ``import apex`` find autoamp, so that programs written for Apex run unmodified.

    Args:
        dtype: The half dtype. None is fp16, the only one that Apex knew, on a CPU too.
        device_type: Which device's tensors are cast; None is the current accelerator's, else ``"cpu"``.
        lists: What `autoamp.init` takes as ``lists``, on top of the set ``"apex"``.
        opt_level: The level of an ``amp.initialize`` that names none.
        loss_scale: ``"dynamic"`` or a number, for an ``amp.initialize`` that names none. None leaves it to the level.
        shadow: Whether an installed real `apex` is hidden by the alias.
        trace_overflow: Whether skipped steps are explained; see `autoamp.init`.

    Raises:
        UsageError: A real `apex` is installed or imported and ``shadow`` is False, or an argument is wrong. Nothing was
            changed.
        ListFileError: A list cannot be used. Nothing was changed.
        LossScaleError: The loss scale is no scale. Nothing was changed.
    """
    check_level(opt_level)
    listed = list(lists) if isinstance(lists, (list, tuple)) else [] if lists is None else [lists]
    half = torch.float16 if dtype is None else dtype
    chosen = Options(half, device_type, ("apex", *listed), opt_level, loss_scale, trace_overflow)
    # Every wrong argument is told now, not at the program's first call.
    Settings.of(
        lists=list(chosen.lists), device_type=chosen.device_type, dtype=chosen.dtype, loss_scale=chosen.loss_scale
    )
    finder = _installed()
    if finder is not None:
        finder.options = chosen
        return
    real = real_apex()
    if real is not None and not shadow:
        raise UsageError(
            f"a real apex is installed ({real}) and is not hidden unasked; uninstall it, or use shadow=True"
        )
    finder = _ApexFinder(chosen)
    for name in _names_of_apex(sys.modules):
        # None forbids the import; it was put there by somebody who meant it.
        if sys.modules[name] is not None:
            finder.shadowed[name] = sys.modules.pop(name)
    sys.meta_path.insert(0, finder)


def uninstall() -> None:
    """Take the alias back: its modules leave ``sys.modules``, and those that it hid come back."""
    finder = _installed()
    if finder is None:
        return
    sys.meta_path.remove(finder)
    for name in _names_of_apex(sys.modules):
        if _is_ours(sys.modules[name]):
            del sys.modules[name]
    sys.modules.update(finder.shadowed)


def is_installed() -> bool:
    """Tell whether ``import apex`` finds autoamp."""
    return _installed() is not None


def options() -> Options:
    """Return what `install_as_apex` was given, or the defaults."""
    finder = _installed()
    return finder.options if finder is not None else Options()


def real_apex() -> str | None:
    """Return where a real `apex` lies, None where there is none. A mere directory of that name is none."""
    module = sys.modules.get("apex")
    if module is not None and not _is_ours(module):
        return str(getattr(module, "__file__", None) or "already imported")
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and not isinstance(finder, _ApexFinder):
            spec = find("apex", None)
            # The spec of a namespace package, a directory without __init__.py, has no origin.
            if spec is not None and spec.origin is not None:
                return str(spec.origin)
    return None


def _installed() -> _ApexFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _ApexFinder)), None)


def _names_of_apex(names: Iterable[str]) -> list[str]:
    return [name for name in names if name in _FILES or name.startswith("apex.")]


def _is_ours(module: types.ModuleType | None) -> bool:
    return Path(getattr(module, "__file__", None) or os.devnull).is_relative_to(_HERE)


def _is_import(frame: types.FrameType | None) -> bool:
    """Tell whether a finder is asked by an import, not by ``importlib.util.find_spec``, which wants None."""
    while frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        if frame.f_code.co_name == "_find_and_load_unlocked":
            return True
        frame = frame.f_back
    return False
