"""Runs for each mutant the tests that execute its line, in a fork of a process that has imported torch."""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import coverage
import hypothesis  # noqa: F401
import pytest

# Imported here once, and not in each fork.
import torch._dynamo
import torch.distributed.tensor
import torch.testing._internal.distributed.fake_pg  # noqa: F401

__all__ = ["Selection"]


Lines: TypeAlias = dict[tuple[str, int], list[str]]
"""The tests that execute a line, by file and number."""


class _Recorder:
    """A plugin of pytest that takes down what each test does.

    Args:
        sources: Lines of files below this folder count.

    Attributes:
        seconds: How long each test takes.
        starters: Those that start a process.
    """

    def __init__(self, sources: Path) -> None:
        self.seconds: dict[str, float] = {}
        self.starters: set[str] = set()
        self._test = ""
        self._coverage = coverage.Coverage(data_file=None, include=[f"{sources}/*"])
        sys.addaudithook(self._audit)

    def _audit(self, event: str, _: Any) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self.starters.add(self._test)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test = item.nodeid
        begin = time.monotonic()
        self._coverage.switch_context(item.nodeid)
        yield
        self.seconds[item.nodeid] = time.monotonic() - begin

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the with statement runs."""
        self._coverage.start()
        yield
        self._coverage.stop()

    def lines(self) -> Lines:
        """Return the tests that execute each line."""
        data = self._coverage.get_data()
        every = ((path, data.contexts_by_lineno(path)) for path in data.measured_files())
        return {(path, line): tests for path, by_line in every for line, tests in by_line.items()}


class _Chosen:
    """A plugin of pytest that runs these tests alone, in this order."""

    def __init__(self, names: list[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._places]
        items.sort(key=lambda item: self._places[item.nodeid])


class Selection:
    """The tests of a copied tree, and which of them execute a line.

    Args:
        folder: The copied tree.
        arguments: What pytest gets to run all of the tests.

    Raises:
        RuntimeError: A test fails in the tree as it is.
    """

    def __init__(self, folder: Path, arguments: str) -> None:
        self._folder = folder
        self._log = folder / "pytest.log"
        self._arguments = shlex.split(arguments)
        taken_down = folder / "tests.pickle"

        def record() -> int:
            recorder = _Recorder(folder / "autoamp")
            with recorder.recording():
                code = self._pytest(self._arguments, recorder)
            taken_down.write_bytes(pickle.dumps((recorder.lines(), recorder.seconds, recorder.starters)))
            return code

        if self._forked(record, limit=3600.0):
            raise RuntimeError(f"the tests fail without a mutant:\n{self._log.read_text(encoding='utf-8')}")
        recorded = pickle.loads(taken_down.read_bytes())
        self._lines: Lines = recorded[0]
        self._seconds: dict[str, float] = recorded[1]
        self._files_with_processes = {_file_of(name) for name in recorded[2] if name}

    def finds(self, path: Path, line: int) -> bool:
        """Whether a test fails, now that a line of a file holds a mutant. One that takes too long fails."""
        names = self._concerned(path, line)
        limit = 60.0 + 3.0 * sum(self._seconds[name] for name in names)
        files = dict.fromkeys(map(_file_of, names))
        marks = [argument for argument in self._arguments if not argument.startswith("tests/")]
        code = self._forked(lambda: self._pytest([*marks, *files], _Chosen(names)), limit)
        # Where no test runs, none fails: a mutant can change the names of parametrized tests.
        # A usage error counts as found: pytest ends with it if conftest.py cannot import the package.
        return code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)

    def _concerned(self, path: Path, line: int) -> list[str]:
        """Return the tests that execute the statement at a line, all where it runs at import; the short ones first.

        What a process runs that a test starts is not known. Files with such tests come last, as a whole.
        """
        numbers = _statement(path.read_text(encoding="utf-8"), line)
        known = {name for number in numbers for name in self._lines.get((str(path), number), ()) if name}
        known = known or {*self._seconds}
        unknown = {name for name in self._seconds if _file_of(name) in self._files_with_processes} - known
        return sorted(known | unknown, key=lambda name: (name in unknown, self._seconds[name]))

    def _pytest(self, arguments: list[str], plugin: object) -> int:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "autoamp")]:
            del sys.modules[name]
        sys.path.insert(0, str(self._folder))
        sys.argv = ["pytest"]
        os.chdir(self._folder)
        os.environ.update(PYTHONPATH=str(self._folder), OMP_NUM_THREADS="1")
        return int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments], plugins=[plugin]))

    def _forked(self, function: Callable[[], int], limit: float) -> int:
        """Run a function in a fork for so many seconds at most, and return what it returns, or else 1."""
        process = os.fork()
        if not process:
            code = 1
            try:
                os.setsid()
                with self._log.open("w") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                code = function()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        end = time.monotonic() + limit
        status = None
        while status is None and time.monotonic() < end:
            time.sleep(0.1)
            ended, found = os.waitpid(process, os.WNOHANG)
            status = found if ended else None
        if status is None:
            print(f"ended after {limit:.0f} s, which counts as found", flush=True)
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return 1
        return os.waitstatus_to_exitcode(status)


def _file_of(name: str) -> str:
    return name.partition("::")[0]


def _statement(source: str, line: int) -> range:
    """Return the lines of the innermost statement that a line is in."""
    spans = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            begin = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            spans.append(range(begin, (node.end_lineno or begin) + 1))
    return min((span for span in spans if line in span), key=len, default=range(line, line + 1))
