"""What the processes that a program starts tell of their runs, for the summary and the report of the first one.

Each writes its report to a file in a folder that an environment variable names, when it ends: processes of
multiprocessing by any start method, forks that end as Python does, ranks of torchrun, and each ``autoamp run`` within.
Not told is what was killed, or has ended by ``os._exit``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import multiprocessing.util
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from autoamp.cli.report import Report

__all__ = ["Children", "ReportWriter", "parents_folder"]

FOLDER_VARIABLE = "AUTOAMP_RUN_CHILDREN"
# Other finalizers of multiprocessing, which stop queues and managers, have priorities from -5 to 10.
_FIRST = 100


def parents_folder() -> Path | None:
    """Return the folder in which a process tells its parent of its run; None where no parent asks."""
    name = os.environ.get(FOLDER_VARIABLE)
    return Path(name) if name and os.path.isdir(name) else None


class Children:
    """The folder for the children of this process, from now on.

    Attributes:
        folder: Where they write to.
    """

    def __init__(self) -> None:
        self._before = os.environ.get(FOLDER_VARIABLE)
        self.folder = Path(tempfile.mkdtemp(prefix="autoamp-run-"))
        os.environ[FOLDER_VARIABLE] = str(self.folder)

    def wait(self) -> None:
        """Wait for the children that Python will wait for anyway, when this process ends."""
        for child in multiprocessing.active_children():
            if not child.daemon:
                child.join()

    def reports(self) -> list[Report]:
        """Return what they told, and remove the folder."""
        found = []
        for file in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found.append(Report(**json.loads(file.read_text(encoding="utf-8"))))
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._before is None:
            os.environ.pop(FOLDER_VARIABLE, None)
        else:
            os.environ[FOLDER_VARIABLE] = self._before
        return found


class ReportWriter:
    """Tells the parent of this process's run, once, when the process ends.

    Args:
        folder: Where to.
        report: Returns how the run went.
    """

    def __init__(self, folder: Path, report: Callable[[], Report]) -> None:
        self._folder = folder
        self._report = report
        self._process = os.getpid()
        self._told = False

    def write_at_end(self) -> None:
        """Let `write` be called at the end of this process, also by multiprocessing, which skips Python's own way."""
        atexit.register(self.write)
        self._finalize()
        # What is to be called at the end is forgotten where the work of a child begins, and then this is called.
        multiprocessing.util.register_after_fork(self, ReportWriter._finalize)

    def _finalize(self) -> None:
        if os.getpid() == self._process:
            multiprocessing.util.Finalize(None, self.write, exitpriority=_FIRST)

    def write(self) -> None:
        """Write the report, where anything was done. Nothing is raised: the program has ended."""
        if self._told or os.getpid() != self._process:
            return
        self._told = True
        report = self._report()
        if report.is_idle and not report.children:
            return
        name = f"{os.getpid()}-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            # Whole, or not there.
            beside = self._folder / f"{name}.tmp"
            beside.write_text(json.dumps(report.as_dict()), encoding="utf-8")
            beside.replace(self._folder / f"{name}.json")
