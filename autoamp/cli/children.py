"""Reports of child processes, for the summary and the report of the process that started them.

A child writes its report when it ends, to a folder that an environment variable names. These are processes of
multiprocessing by any start method, and forks that end as Python does. A process that is killed, or that ends by
``os._exit``, writes none.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.util
import os
import shutil
import tempfile
import uuid
from dataclasses import asdict
from pathlib import Path

from autoamp.cli.report import Report
from autoamp.cli.session import Run

FOLDER_VARIABLE = "AUTOAMP_RUN_CHILDREN"
# Other finalizers of multiprocessing, which stop queues and managers, have priorities from -5 to 10.
_FIRST = 100


def parents_folder() -> Path | None:
    """Return the folder to which this process writes its report; None if no parent reads it."""
    name = os.environ.get(FOLDER_VARIABLE)
    return Path(name) if name and os.path.isdir(name) else None


def make_folder() -> Path:
    """Make a folder for the reports of the children that this process starts from now on."""
    folder = Path(tempfile.mkdtemp(prefix="autoamp-run-"))
    os.environ[FOLDER_VARIABLE] = str(folder)
    return folder


def take_reports(folder: Path) -> list[Report]:
    """Return the reports of the children, and remove the folder."""
    found = []
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Report(**json.loads(file.read_text(encoding="utf-8"))))
    shutil.rmtree(folder, ignore_errors=True)
    return found


class ChildReports:
    """Lets each fork of this process report what it did itself, and this process too after `write_at_end`.

    Args:
        run: The run of this process, which its forks continue.
        folder: The parent's folder.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self._run = run
        self._folder = folder
        # The process that has a report to write.
        self._process: int | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_in_fork)
        # Where the work of a fork begins, multiprocessing drops all finalizers and then calls this.
        multiprocessing.util.register_after_fork(self, ChildReports._finalize)

    def write_at_end(self) -> None:
        """Write the report when this process ends, either as Python does or as multiprocessing does."""
        self._process = os.getpid()
        atexit.register(self._write)
        self._finalize()

    def _begin_in_fork(self) -> None:
        self._run.reset()
        self.write_at_end()

    def _finalize(self) -> None:
        if self._process == os.getpid():
            multiprocessing.util.Finalize(None, self._write, exitpriority=_FIRST)

    def _write(self) -> None:
        """Write the report, unless this process did nothing. An OSError is ignored: the process has ended."""
        if self._process != os.getpid():
            return
        self._process = None
        report = self._run.report([], 0)
        name = f"{os.getpid()}-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            if not report.is_idle:
                # The parent reads whole files only.
                partial = self._folder / f"{name}.tmp"
                partial.write_text(json.dumps(asdict(report)), encoding="utf-8")
                partial.replace(self._folder / f"{name}.json")
