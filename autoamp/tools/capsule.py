"""A capsule: one file with all that is needed to find the cause of an overflow again, on another machine.

The file is a zip archive of two files. ``finding.json`` has what the run found. ``tape.pt`` is the tape of the step:
names of operators, and tensors. Loading it runs no code, and running it needs nothing of the program.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autoamp.core import several_processes, versions
from autoamp.errors import TapeError, UsageError
from autoamp.tools.findings import explain_tape
from autoamp.tools.tape import Tape, load_tape, save_tape
from autoamp.tools.verdicts import HalfPrecisionOp, NotFiniteInFp32, Overflow

log = logging.getLogger(__name__)

_FORMAT = 8


class Capsule(NamedTuple):
    """What a capsule holds.

    Attributes:
        overflow: What the run found, as `Overflow.to_dict` returns it.
        text: The same as a sentence.
        versions: Of autoamp, torch and Python, by name.
        tape: The step.
    """

    overflow: dict[str, Any]
    text: str
    versions: dict[str, str]
    tape: Tape

    def replay(self) -> Overflow:
        """Run the step again and return what is found here."""
        return explain_tape(self.tape)


class CapsuleWriter:
    """Writes a capsule for each place that made inf or nan, once.

    Args:
        folder: Where to; it is made if it is not there.

    Raises:
        UsageError: The folder is a file.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).absolute()
        self._places: set[Any] = set()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"capsule={str(folder)!r}: expected a folder that can be written, got {error}") from None

    def write(self, found: Overflow, tape: Callable[[], Tape]) -> None:
        """Write a capsule if a finding is located and the first of its place, or log why not.

        Args:
            found: What was found in the step.
            tape: Returns the step.
        """
        if not isinstance(found.verdict, (HalfPrecisionOp, NotFiniteInFp32)) or found.place in self._places:
            return
        self._places.add(found.place)
        rank = f"-rank-{torch.distributed.get_rank()}" if several_processes() else ""
        name = f"step-{found.iteration}-{found.op or found.kind}{rank}"
        paths = (self._folder / f"{name}{f'-{n}' if n else ''}.capsule" for n in itertools.count())
        # That of an earlier run stays.
        path = next(path for path in paths if not path.exists())
        try:
            file = io.BytesIO()
            save_tape(tape(), file)
            size = file.getbuffer().nbytes / 2**20
            log.warning("writing %s, %.1f MiB: it holds the weights and inputs of the step", path, size)
            finding = {"format": _FORMAT, "overflow": found.to_dict(), "text": str(found), "versions": versions()}
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("finding.json", json.dumps(finding))
                archive.writestr("tape.pt", file.getvalue())
        except BaseException as error:
            # A part of the file may be there.
            path.unlink(missing_ok=True)
            if not isinstance(error, Exception):
                raise
            log.warning("no capsule of step %s: %s: %s", found.iteration, type(error).__name__, error)
        else:
            log.warning("run the step again with: autoamp replay %s", path)


def load_capsule(path: str | Path) -> Capsule:
    """Load a capsule. No code in the file runs. Texts in it may hold what a terminal acts on.

    Args:
        path: The file.

    Raises:
        UsageError: The file is no capsule, is of another version, or is damaged.
    """
    shown = repr(str(path))
    try:
        with zipfile.ZipFile(path) as archive:
            finding = json.loads(archive.read("finding.json"))
            version = finding["format"]
            step = io.BytesIO(archive.read("tape.pt")) if version == _FORMAT else None
    except OSError as error:
        raise UsageError(f"cannot read {shown}: {error.strerror}; give a file of autoamp run --capsule") from None
    except (zipfile.BadZipFile, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        raise UsageError(f"{shown} is no capsule; give a file of run --capsule") from None
    if step is None:
        raise UsageError(
            f"{shown} has format {version!r} of capsules, expected {_FORMAT}; use the autoamp that wrote it"
        )
    try:
        found, written_by = dict(finding["overflow"]), dict(finding["versions"])
        return Capsule({"op": None, **found}, str(finding["text"]), written_by, load_tape(step))
    except TapeError as error:
        raise UsageError(f"cannot load {shown}: {error}") from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"{shown} is a damaged capsule: {type(error).__name__}") from None
