"""A capsule: one file with all that is needed to run a recorded step again in another process.

The file is a zip archive of two files. ``finding.json`` has what the run found. ``step.pt`` is a `torch.save` of the
model with its code, the arguments and the settings. It is loaded last: loading a pickle runs code.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import pickle
import platform
import sys
import sysconfig
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from autoamp.diagnostics.records import Record
from autoamp.diagnostics.replay import unwrapped
from autoamp.diagnostics.verdicts import HalfPrecisionOp, NotFiniteInFp32, Overflow
from autoamp.errors import UsageError
from autoamp.rules import ModulePrecision
from autoamp.stepping import several_processes
from autoamp.tensors import compacted, iter_tensors, map_tensors, version_of

__all__ = ["Capsule", "CapsuleWriter", "load_capsule", "versions"]

log = logging.getLogger(__name__)

_FORMAT = 5
# Packages that are not put into the file, wherever they lie.
_INSTALLED = frozenset(("autoamp", "autoamp_kernels", "cloudpickle", "torch"))


class Capsule(NamedTuple):
    """What a capsule holds.

    Attributes:
        overflow: What the run found, as `Overflow.to_dict` returns it.
        text: The same as a sentence.
        versions: Of autoamp, torch and Python, by name.
        records: The module calls of the step.
        precisions: The modules that ran in a precision of their own, and which.
        settings: Those of the run's handle.
        scale: The loss scale of the step.
    """

    overflow: dict[str, Any]
    text: str
    versions: dict[str, str]
    records: list[Record]
    precisions: list[tuple[Module, Any]]
    settings: Any
    scale: float


class CapsuleWriter:
    """Writes a capsule for each place that made inf or nan, once.

    Args:
        folder: Where to; it is made if it is not there.
        settings: Those of the handle, without what belongs to the process, such as a loss scaler.
        precision_of: Returns the precision that a module was given, None for a module without.

    Raises:
        UsageError: cloudpickle is not installed, or the folder is a file.
    """

    def __init__(
        self, folder: str | Path, settings: Any, precision_of: Callable[[Module], ModulePrecision | None]
    ) -> None:
        self._folder = Path(folder).absolute()
        self._precision_of = precision_of
        self._settings = settings
        self._places: set[Any] = set()
        _cloudpickle()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"capsule={str(folder)!r}: expected a folder that can be written, got {error}") from None

    def write(self, found: Overflow, records: Sequence[Record], scale: float) -> None:
        """Write a capsule if a finding is located and the first of its place, or log why not.

        Args:
            found: What was found in the step.
            records: The module calls of the step.
            scale: Its loss scale.
        """
        if not isinstance(found.verdict, (HalfPrecisionOp, NotFiniteInFp32)) or found.place in self._places:
            return
        self._places.add(found.place)
        if found.module is None:
            why = "the inf or nan is not made within the calls of modules, which a capsule holds"
            log.warning("no capsule of step %s: %s", found.iteration, why)
            return
        path = self._free_path(f"step-{found.iteration}-{found.op or found.kind}")
        try:
            self._write(path, found, records, scale)
        except BaseException as error:
            # A part of the file may be there.
            path.unlink(missing_ok=True)
            if not isinstance(error, Exception):
                raise
            # Code of the program's own, such as a `__getstate__`, raises anything.
            log.warning("no capsule of step %s: %s: %s", found.iteration, type(error).__name__, error)
        else:
            log.warning("run the step again with: autoamp replay %s", path)

    def _free_path(self, name: str) -> Path:
        """Return a path of this rank that no earlier run has written."""
        rank = f"-rank-{torch.distributed.get_rank()}" if several_processes() else ""
        paths = (self._folder / f"{name}{rank}{f'-{n}' if n else ''}.capsule" for n in itertools.count())
        return next(path for path in paths if not path.exists())

    def _write(self, path: Path, found: Overflow, records: Sequence[Record], scale: float) -> None:
        kept = [_kept(record) for record in records]
        modules = dict.fromkeys(module for record in kept for module in record.module.modules())
        precisions = [(module, given.value) for module in modules if (given := self._precision_of(module)) is not None]
        step = {"records": kept, "precisions": precisions, "settings": self._settings, "scale": scale}
        finding = {
            "format": _FORMAT, "overflow": found.to_dict(), "text": str(found), "versions": versions(),
        }  # fmt: skip
        weights = {tensor for module in modules for tensor in (*module.parameters(False), *module.buffers(False))}
        size = sum(tensor.nbytes for tensor in (*weights, *iter_tensors([record.inputs for record in kept])))
        log.warning("writing %s, %.1f MiB: it holds the weights and inputs of the step", path, size / 2**20)
        with zipfile.ZipFile(path, "w") as archive, _own_code_by_value() as cloudpickle:
            archive.writestr("finding.json", json.dumps(finding))
            with archive.open("step.pt", "w", force_zip64=True) as file:
                torch.save(step, file, pickle_module=cloudpickle, pickle_protocol=pickle.HIGHEST_PROTOCOL)


def load_capsule(path: str | Path, tell: Callable[[str], None]) -> Capsule:
    """Load a capsule, which runs code of it: its pickle is loaded last.

    Args:
        path: The file.
        tell: Is given the finding of the run as a sentence, before the pickle is loaded.

    Raises:
        UsageError: The file is no capsule, or needs a device or a module that is not here.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            finding = json.loads(archive.read("finding.json"))
            step = io.BytesIO(archive.read("step.pt"))
        is_ours, text, python = finding.pop("format") == _FORMAT, finding["text"], finding["versions"]["python"]
        writer = ", ".join(f"{name} {version}" for name, version in finding["versions"].items())
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (zipfile.BadZipFile, AttributeError, LookupError, TypeError, ValueError):
        is_ours = False
    if not is_ours:
        raise UsageError(f"{str(path)!r} is no capsule of this version of autoamp; give a file of run --capsule")
    tell(text)
    if python.rpartition(".")[0] != platform.python_version().rpartition(".")[0]:
        raise UsageError(
            f"{str(path)!r} has code of Python {python}, this is {platform.python_version()}; use that one"
        )
    try:
        loaded = torch.load(step, weights_only=False)
        for record in loaded["records"]:
            record.versions = [(tensor, version_of(tensor)) for tensor in iter_tensors(record.inputs)]
        return Capsule(**finding, **loaded)
    except Exception as error:
        # As of a capsule of CUDA tensors on a machine without, of a package that is not installed here, or of the
        # program's own `__setstate__`.
        first = str(error).partition("\n")[0]
        raise UsageError(f"cannot load {str(path)!r}: {first}; it was written by {writer}") from None


def versions() -> dict[str, str]:
    """Return the versions of autoamp, torch and Python."""
    ours = str(getattr(sys.modules.get("autoamp"), "__version__", "unknown"))
    return {"autoamp": ours, "torch": str(torch.__version__), "python": platform.python_version()}


def _kept(record: Record) -> Record:
    """Return a record as the file has it. The versions of tensors are those of this process."""
    inputs, gradients = map_tensors(record.inputs, compacted), map_tensors(record.gradients, compacted)
    return replace(record, module=unwrapped(record.module), inputs=inputs, gradients=gradients, versions=[])


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        raise UsageError("a capsule needs cloudpickle; pip install 'autoamp[capsule]'") from None
    return cloudpickle


@contextlib.contextmanager
def _own_code_by_value() -> Iterator[Any]:
    """Yield cloudpickle, which puts the code of the program's own modules into a file."""
    cloudpickle, own = _cloudpickle(), _own_modules()
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield cloudpickle
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _own_modules() -> list[types.ModuleType]:
    """Return the modules of the program itself, whose code goes into the file: all that are not installed."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = tuple(str(Path(path).resolve()) for path in paths)
    registered = _cloudpickle().list_registry_pickle_by_value()
    found = []
    for name, module in list(sys.modules.items()):
        path = str(Path(getattr(module, "__file__", None) or "").resolve())
        is_listed = name in registered or name == "__main__" or name.partition(".")[0] in _INSTALLED
        is_installed = path.startswith(installed) or "site-packages" in path
        if path.endswith(".py") and getattr(module, "__name__", None) == name and not is_listed and not is_installed:
            found.append(module)
    return found
