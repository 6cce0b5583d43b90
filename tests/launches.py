"""Runs scripts and command lines of autoamp as programs of their own, for the tests of several packages.

Importing torch takes seconds, so one process imports it and autoamp, and forks for each program of all test files.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")

# Answers requests: each is a folder, modules to import, and lines of arguments. A fork imports the modules, and forks
# again for each line in turn. The answer tells how those ended; it is null if an import fails. What a program raises
# unwinds to the top of the interpreter, as it would have. A line is `autoamp`'s arguments, or "python" and a script,
# which runs in its folder. Items NAME=value before it are environment variables.
DRIVER = """
import gc, importlib, json, os, runpy, signal, sys, tempfile, time
gc.disable()
import torch
import autoamp.cli.run, autoamp.exports
from autoamp.cli import main

# The first optimizer of a process imports torch's compiler, which takes as long as torch.
torch.optim.SGD([torch.ones(1)], lr=1.0)

# For all programs of a request together, in seconds: less than pytest's faulthandler_timeout, which ends all tests.
LIMIT = 800

def fork():
    # A fork that looked through what is there by now would copy all of it.
    gc.freeze()
    return os.fork()

def run(argv, end):
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    pid = fork()
    if pid == 0:
        gc.enable()
        signal.alarm(max(1, int(end - time.monotonic())))
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
    if status == -signal.SIGALRM:
        texts[1] += f"The test killed this program: all programs of one request may take {LIMIT} s together."
    return [status, *texts]

requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
# Programs have nothing to read.
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
program = None
for line in requests:
    folder, imports, programs = json.loads(line)
    answer = tempfile.TemporaryFile("w+")
    pid = fork()
    if pid:
        os.waitpid(pid, 0)
        answer.seek(0)
        print(answer.read() or "null", file=answers, flush=True)
        continue
    os.chdir(folder)
    for name in imports:
        importlib.import_module(name)
    ended, end = [], time.monotonic() + LIMIT
    for argv in programs:
        result = run(argv, end)
        if result is None:
            program = argv
            break
        ended.append(result)
    else:
        json.dump(ended, answer)
        answer.flush()
        os._exit(0)
    break
if program and program[0] == "python":
    sys.argv = program[1:]
    sys.path[0], script = os.path.split(os.path.abspath(program[1]))
    os.chdir(sys.path[0])
    runpy.run_path(script, run_name="__main__")
elif program:
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
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AUTOAMP", "PYTHON", "PYTEST"))}
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


@functools.cache
def driver(variables: frozenset[tuple[str, str]]) -> subprocess.Popen[str]:
    """Start what forks for programs that have these environment variables. It ends when its standard input does."""
    command = [sys.executable, "-c", DRIVER]
    return subprocess.Popen(
        command, cwd=ROOT, env=dict(variables), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def launched(
    folder: Path, runs: Mapping[str, Sequence[str]], imports: Sequence[str] = (), **variables: str | None
) -> dict[str, Ended]:
    """Run each script or command line of autoamp in ``folder``, and return how each ended.

    What all of them import is best imported once, before the forks: ``imports``. A variable that is None is unset.
    Variables that are given here take a process of their own, which imports torch again.
    """
    wanted = {**environment(), **variables}
    process = driver(frozenset((name, value) for name, value in wanted.items() if value is not None))
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps([str(folder), list(imports), list(runs.values())]), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, "the process that forks for programs ended; its standard error tells why"
    ended = json.loads(answer)
    assert ended is not None, f"the imports of {list(imports)} failed; the captured standard error tells why"
    return {name: Ended(*result) for name, result in zip(runs, ended, strict=True)}
