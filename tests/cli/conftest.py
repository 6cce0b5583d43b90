"""Fixtures for `autoamp tune` and `autoamp bisect`: a script in a folder of its own, and runs of it in forks."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoamp.cli import program_child
from autoamp.cli.program_runs import ProgramRuns


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the script, in the working directory."""
    monkeypatch.chdir(tmp_path)
    # A child finds the checkout, as the tests do.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return tmp_path / "script.py"


def wait_for_fork(runs: ProgramRuns, command: list[str], environment: dict[str, str], out: Any, err: Any) -> int:
    """Run a child as a fork of this process, which has imported torch."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
    os.environ.update(environment)
    code = 1
    try:
        program_child.main(command[3], command[4:])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children are forks, where there are any."""
    if hasattr(os, "fork"):
        monkeypatch.setattr(ProgramRuns, "_waited_for", wait_for_fork)


@pytest.fixture
def runs_of(script: Path, tmp_path: Path) -> Callable[..., ProgramRuns]:
    """Returns the runs of a program in fp16 on the CPU."""

    def runs_of(text: str, **options: Any) -> ProgramRuns:
        script.write_text(text)
        chosen = {
            "metric": "loss", "dtype": "fp16", "device_type": "cpu", "lists": [], "is_module": False, "seed": 0,
            "survey_steps": 1, "program": str(script), "args": [], **options,
        }  # fmt: skip
        folder = tmp_path / "runs"
        folder.mkdir()
        return ProgramRuns(argparse.Namespace(**chosen), folder, 300.0)

    return runs_of
