"""A capsule: one file with all that is needed to run a recorded step again in another process.

The file is a `torch.save` of plain values and tensors, which ``torch.load(weights_only=True)`` reads. One of them,
``code``, is a pickle of the model, its arguments and the settings, whose tensors are numbers of those beside it. It
is loaded last: loading a pickle runs code.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import logging
import pickle
import platform
import sys
import sysconfig
import types
import weakref
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from autoamp.diagnostics.records import Record
from autoamp.diagnostics.replay import unwrapped
from autoamp.diagnostics.verdicts import HalfPrecisionOp, NotFiniteInFp32, Overflow
from autoamp.errors import UsageError
from autoamp.rules import ModulePrecision
from autoamp.stepping import several_processes
from autoamp.tensors import version_of

__all__ = ["Capsule", "CapsuleWriter", "capsule_versions", "load_capsule"]

log = logging.getLogger(__name__)

_FORMAT = 1
# Packages that are not put into the file, wherever they lie.
_INSTALLED = frozenset(("autoamp", "autoamp_command", "autoamp_kernels", "autoamp_startup", "cloudpickle", "torch"))
_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError)


class Capsule(NamedTuple):
    """What a capsule holds.

    Attributes:
        overflow: What the run found, as `Overflow.to_dict` returns it.
        text: The same as a sentence.
        versions: Of autoamp, torch and Python, by name.
        records: The module calls of the step.
        modules: Their models, which the records refer to weakly.
        precisions: The modules that ran in a precision of their own, and which.
        settings: Those of the run's handle.
        scale: The loss scale of the step.
    """

    overflow: dict[str, Any]
    text: str
    versions: dict[str, str]
    records: list[Record]
    modules: list[Module]
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

    def wants(self, found: Overflow) -> bool:
        """Return whether a finding is located, and is the first of its place."""
        return isinstance(found.verdict, (HalfPrecisionOp, NotFiniteInFp32)) and found.place not in self._places

    def write(self, found: Overflow, again: Overflow | None, records: Sequence[Record], scale: float) -> None:
        """Write a capsule if the module calls alone lead to the finding, else log why not.

        Args:
            found: What was found in the step.
            again: What is found by the module calls alone.
            records: The module calls of the step.
            scale: Its loss scale.
        """
        self._places.add(found.place)
        try:
            if again is None or again.place != found.place:
                raise UsageError("the inf or nan is not made within the calls of modules, which a capsule holds")
            content = self._content(found, records, scale)
            size = sum(tensor.untyped_storage().nbytes() for tensor in content["tensors"]) + content["code"].nbytes
            path = self._free_path(f"step-{found.iteration}-{found.op or found.kind}")
            log.warning("writing %s, %.1f MiB: it holds the weights and inputs of the step", path, size / 2**20)
            try:
                torch.save(content, path)
            except BaseException:
                # On a full disk a part of the file is there.
                path.unlink(missing_ok=True)
                raise
        except (UsageError, OSError, *_UNPICKLABLE) as error:
            # The program goes on without it.
            log.warning("no capsule of step %s: %s", found.iteration, error)
        else:
            log.warning("run the step again with: autoamp replay %s", path)

    def _free_path(self, name: str) -> Path:
        """Return a path of this rank that no earlier run has written."""
        rank = f"-rank-{torch.distributed.get_rank()}" if several_processes() else ""
        paths = (self._folder / f"{name}{rank}{f'-{n}' if n else ''}.capsule" for n in itertools.count())
        return next(path for path in paths if not path.exists())

    def _content(self, found: Overflow, records: Sequence[Record], scale: float) -> dict[str, Any]:
        tensors: list[Tensor] = []
        parts = [_parts_of(record) for record in records]
        modules = dict.fromkeys(module for one in parts for module in one["module"].modules())
        precisions = [(module, given.value) for module in modules if (given := self._precision_of(module)) is not None]
        code = _pickled({"records": parts, "precisions": precisions, "settings": self._settings}, tensors)
        return {
            "format": _FORMAT,
            "overflow": found.to_dict(),
            "text": str(found),
            "versions": capsule_versions(),
            "scale": scale,
            "tensors": tensors,
            "code": torch.frombuffer(bytearray(code), dtype=torch.uint8),
        }


def load_capsule(path: str | Path, tell: Callable[[str], None]) -> Capsule:
    """Load a capsule, which runs code of it: its pickle is loaded last.

    Args:
        path: The file.
        tell: Is given the finding of the run as a sentence, before the pickle is loaded.

    Raises:
        UsageError: The file is no capsule, or needs a device or a module that is not here.
    """
    try:
        with open(path, "rb") as file:
            is_capsule = zipfile.is_zipfile(file)
        content = torch.load(path, weights_only=True) if is_capsule else None
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except pickle.UnpicklingError:
        content = None
    except RuntimeError as error:
        # As of a capsule of CUDA tensors on a machine without.
        raise UsageError(f"cannot load {str(path)!r}: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UsageError(f"{str(path)!r} is no capsule of this version of autoamp; give a file of run --capsule")
    tell(content["text"])
    python = content["versions"]["Python"]
    if python.rpartition(".")[0] != platform.python_version().rpartition(".")[0]:
        raise UsageError(
            f"{str(path)!r} has code of Python {python}, this is {platform.python_version()}; use that one"
        )
    try:
        loaded = _Unpickler(io.BytesIO(content["code"].numpy().tobytes()), content["tensors"]).load()
    except (ImportError, AttributeError, TypeError) as error:
        versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        raise UsageError(f"{str(path)!r} needs code that is not here: {error}; it was written by {versions}") from None
    records = [_record_of(parts) for parts in loaded["records"]]
    modules = [parts["module"] for parts in loaded["records"]]
    return Capsule(
        content["overflow"], content["text"], content["versions"], records, modules, loaded["precisions"],
        loaded["settings"], content["scale"],
    )  # fmt: skip


def capsule_versions() -> dict[str, str]:
    """Return the versions of autoamp, torch and Python."""
    ours = str(getattr(sys.modules.get("autoamp"), "__version__", "unknown"))
    return {"autoamp": ours, "torch": str(torch.__version__), "Python": platform.python_version()}


# -- records --


def _parts_of(record: Record) -> dict[str, Any]:
    """Return the attributes of a record. What goes by identity stands as the tensors themselves."""
    parts = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    module = record.module()
    assert module is not None
    parts["module"] = unwrapped(module)
    if parts["module"] is not module:
        parts["buffers"] = {name.removeprefix("module."): value for name, value in record.buffers.items()}
    parts["versions"] = [tensor for tensor, _ in record.versions]
    parts["wanted"] = [tensor for tensor, _ in record.versions if id(tensor) in record.wanted]
    return parts


def _record_of(parts: dict[str, Any]) -> Record:
    """Return a record of what `_parts_of` returned; its module lives as long as ``parts``."""
    changed = {
        "module": weakref.ref(parts["module"]),
        "versions": [(tensor, version_of(tensor)) for tensor in parts["versions"]],
        "wanted": {id(tensor) for tensor in parts["wanted"]},
        "outputs": [(kept[0], version_of(kept[0])) if isinstance(kept, tuple) else kept for kept in parts["outputs"]],
    }
    return Record(**{**parts, **changed})


# -- pickles --


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        raise UsageError("a capsule needs cloudpickle; pip install 'autoamp[capsule]'") from None
    return cloudpickle


def _pickled(value: Any, tensors: list[Tensor]) -> bytes:
    """Return a pickle with the program's own code, and append its tensors to a list."""
    cloudpickle = _cloudpickle()
    numbers: dict[int, int] = {}
    # Ids are not reused while the tensors live.
    alive: list[Tensor] = []

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc,name-defined]
        def persistent_id(self, one: Any) -> int | None:
            if type(one) not in (Tensor, Parameter):
                return None
            if id(one) not in numbers:
                numbers[id(one)] = len(tensors)
                alive.append(one)
                tensors.append(_compact(one))
            return numbers[id(one)]

    own = _own_modules()
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    file = io.BytesIO()
    try:
        Pickler(file).dump(value)
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def _compact(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, and without the rest of a larger one that it is a part of."""
    if isinstance(tensor, Parameter):
        return tensor
    kept = tensor.detach()
    return kept.clone() if kept.layout is torch.strided and kept.untyped_storage().nbytes() > kept.nbytes else kept


def _own_modules() -> list[types.ModuleType]:
    """Return the modules of the program itself, whose code goes into the file: all that are not installed."""
    installed = {
        str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    registered = _cloudpickle().list_registry_pickle_by_value()
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name in registered or name == "__main__" or name.partition(".")[0] in _INSTALLED:
            continue
        if getattr(module, "__name__", None) == name and file.endswith(".py"):
            path = str(Path(file).resolve())
            if not any(path.startswith(folder) for folder in installed) and "site-packages" not in path:
                found.append(module)
    return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        tensor: Tensor = self._tensors[number]
        return tensor
