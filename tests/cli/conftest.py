"""Fixtures for `autoamp tune` and `autoamp bisect`: a script in a folder of its own, and runs of it in forks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoamp.cli import searches
from autoamp.cli.searches import ProgramRuns


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of `autoamp` puts the folder of the program on the path of its process, for good."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the script, in the working directory."""
    monkeypatch.chdir(tmp_path)
    # A child finds the checkout, as the tests do.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return tmp_path / "script.py"


class Fork:
    """A child as `subprocess.Popen` starts it, but as a fork of this process, which has imported torch."""

    def __init__(self, command: list[str], *, stdout: Any, stderr: Any, env: dict[str, str], **_: Any) -> None:
        assert command[:3] == [sys.executable, "-m", searches.__name__]
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            os.dup2(stdout.fileno(), 1), os.dup2(stderr.fileno(), 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
            os.environ.update(env)
            searches.run_in_child(command[3])
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, however long that takes."""
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code that `wait` has found, None if a signal interrupted it."""
        return self.returncode


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children are forks, where there are any."""
    if hasattr(os, "fork"):
        monkeypatch.setattr(subprocess, "Popen", Fork)


@pytest.fixture
def runs_of(script: Path, tmp_path: Path) -> Callable[..., ProgramRuns]:
    """Returns the runs of a program in fp16 on the CPU."""

    def runs_of(text: str, budget: float = 300.0, **options: Any) -> ProgramRuns:
        script.write_text(text)
        chosen = {
            "metric": "loss", "dtype": "fp16", "device_type": "cpu", "lists": [], "is_module": False, "seed": 0,
            "survey_steps": 1, "program": str(script), "args": [], **options,
        }  # fmt: skip
        folder = tmp_path / "runs"
        folder.mkdir()
        return ProgramRuns(argparse.Namespace(**chosen), folder, budget)

    return runs_of
