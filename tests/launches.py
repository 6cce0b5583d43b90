"""Runs scripts and command lines of autoamp as programs of their own, for the tests of several packages.

Importing torch takes seconds, so one process imports it and autoamp, and forks for each program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Forks for each line of arguments, and tells how the fork ended. What a child raises unwinds to the top of the
# interpreter, as it would have. A line is `autoamp`'s arguments, or "python" and a script, which runs in its folder.
# Items NAME=value before it are environment variables.
DRIVER = """
import gc, importlib, json, os, runpy, sys, tempfile
gc.disable()
import torch
import autoamp.cli
from autoamp_command import main

for name in sys.argv[2:]:
    importlib.import_module(name)

# The first optimizer of a process imports torch's compiler, which takes as long as torch.
torch.optim.SGD([torch.ones(1)], lr=1.0)

# A fork that looked through what is there by now would copy all of it.
gc.freeze()

def run(argv):
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    pid = os.fork()
    if pid == 0:
        gc.enable()
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        while "=" in argv[0]:
            name, _, os.environ[name] = argv.pop(0).partition("=")
        sys.argv = ["autoamp", *argv]
        return None
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = []
    for file in (out, err):
        file.seek(0)
        texts.append(file.read().decode())
    return [status, *texts]

ended = []
for argv in json.loads(sys.argv[1]):
    result = run(argv)
    if result is None:
        ended = None
        break
    ended.append(result)
if ended is not None:
    print(json.dumps(ended))
elif argv[0] == "python":
    sys.argv = argv[1:]
    sys.path[0], script = os.path.split(os.path.abspath(argv[1]))
    os.chdir(sys.path[0])
    runpy.run_path(script, run_name="__main__")
else:
    sys.exit(main())
"""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    """The tree is on the path, and no setting of this process reaches the programs: all machines have all units."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AUTOAMP", "PYTHON"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AUTOAMP_HALF_UNITS": "bf16,fp16"}


def plainly(folder: Path, *argv: str) -> Ended:
    """Run a program with plain Python."""
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def written(folder: Path, texts: Mapping[str, str]) -> Path:
    """Write files into a folder, and return it."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def launched(
    folder: Path, runs: Mapping[str, Sequence[str]], imports: Sequence[str] = (), **variables: str | None
) -> dict[str, Ended]:
    """Run each script or command line of autoamp in ``folder``, and return how each ended.

    What all of them import is best imported once, before the forks: ``imports``. A variable that is None is unset.
    """
    variables = {**environment(), **variables}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(list(runs.values())), *imports],
        cwd=folder, env={name: value for name, value in variables.items() if value is not None},
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name: Ended(*result) for name, result in zip(runs, json.loads(done.stdout), strict=True)}
