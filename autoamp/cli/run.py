"""`autoamp run`: its command line, what it tells at the end, and its exit codes."""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoamp.cli.children import Children, ReportWriter, parents_folder
from autoamp.cli.launch import Program, prepared, take_path
from autoamp.cli.options import Options
from autoamp.cli.output import folded, is_read, say, writable
from autoamp.cli.report import Report
from autoamp.cli.reports import FAILED
from autoamp.cli.session import Run, set_up
from autoamp.compat import added_to_real_apex
from autoamp.diagnostics import check_report_tools, failures, is_page, write_report
from autoamp.errors import UsageError

__all__ = ["prepared_run", "set_up_child"]

TERM = signal.SIGTERM
TORCHRUN = "torch.distributed.run"
# Seconds for the summary and the report of a process that is told to end.
_LAST_WORDS = 10.0


def prepared_run(chosen: argparse.Namespace) -> Callable[[], None]:
    """Set this process up, and return a function that runs the program and notes its exit code.

    Args:
        chosen: What the command line was parsed to.

    Raises:
        UsageError: An option is wrong, or there is no such program.
        ListFileError: A list cannot be used.
    """
    options = Options.of(vars(chosen))
    if chosen.is_module and chosen.program == TORCHRUN:
        chosen.args = _for_ranks(chosen.args, chosen.options)
        # Each rank casts, writes the report and judges; this process starts them.
        chosen.report = chosen.fail_on = None
        options = dataclasses.replace(options, opt_level="O0")
    if chosen.report is not None or chosen.fail_on is not None:
        # Of several ranks all trace, or none.
        options = dataclasses.replace(options, trace_overflow=True)
    path = None if chosen.report is None else writable("--report", chosen.report)
    if path is not None and is_page(path):
        check_report_tools()
    program = Program(chosen.program, tuple(chosen.args), chosen.is_module)
    # The program's own path first: it decides what `apex` is, and a package is imported to find its module.
    take_path(program)
    first = os.environ.get("RANK", "0") == "0"
    judged = chosen.fail_on is not None
    speaks, parent = first and not chosen.quiet, parents_folder()
    counts = (first and path is not None) or speaks or parent is not None
    reports = first and path is not None
    # What --fail-on asks for needs no close look.
    run = set_up(options, count=counts, record=judged or reports, sample=reports)
    run_program = prepared(program, run.options.as_dict())
    if run.real_apex is not None and first:
        added = added_to_real_apex()
        what = f"autoamp adds what it lacks: {', '.join(added)}" if "amp" in added else "it takes the imports"
        say(f"a real apex is installed ({run.real_apex}); {what}; --shadow-apex hides it")
    end = _RunEnd(run, chosen, path if first else None, parent, counts=counts, quiet=not speaks)
    # Python runs this after the traceback and after the program's own exit functions.
    atexit.register(end.tell)
    end.tell_if_terminated()

    def run_and_note() -> None:
        try:
            run_program()
        except BaseException as error:
            end.exit_code = _exit_code(error)
            end.program_ended()
            if end.exit_code:
                raise
            end.judge()
            raise
        end.program_ended()
        end.judge()

    return run_and_note


def _for_ranks(args: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return torchrun's arguments with ``autoamp run`` before the program of each rank.

    Args:
        args: Torchrun's own, with its program and the program's arguments.
        options: The options of this command, which each rank gets.
    """
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(list(args))
    if given.no_python:
        return list(args)
    head = args[: len(args) - len(given.training_script_args) - 1]
    ours = [option for option in options if option != "-m"]
    is_module = ["-m"] if given.module else []
    return [
        *(arg for arg in head if arg not in ("-m", "--module")),
        *("-m", "autoamp", "run", *ours, "--quiet", *is_module, given.training_script, *given.training_script_args),
    ]


def set_up_child(options: Mapping[str, Any]) -> None:
    """Set up a process that a program under `autoamp run` started, as the program's own was."""
    folder = parents_folder()
    run = set_up(Options.of(options), count=folder is not None)
    if folder is not None:
        ReportWriter(folder, lambda: run.report([], 0)).write_at_end()
        _tell_from_forks(run, folder)


def _tell_from_forks(run: Run, folder: Path) -> None:
    """Let each fork of this process tell of what it did itself."""
    if not hasattr(os, "register_at_fork"):
        return

    # Held here: since Python 3.13 multiprocessing clears atexit's functions in its forks.
    held: list[ReportWriter] = []

    def forked() -> None:
        run.reset()
        held[:] = [ReportWriter(folder, lambda: run.report([], 0))]
        held[0].write_at_end()

    os.register_at_fork(after_in_child=forked)


class _RunEnd:
    """Writes the summary and the report when the program has ended, in the process that began it."""

    def __init__(
        self, run: Run, chosen: argparse.Namespace, path: Path | None, parent: Path | None, *, counts: bool, quiet: bool
    ) -> None:
        self.exit_code = 0
        self._run = run
        self._program = [chosen.program, *chosen.args]
        self._fail_on: str | None = chosen.fail_on
        self._document: dict[str, Any] = {}
        self._path = path
        self._quiet = quiet
        self._parent = parent
        self._process = os.getpid()
        self._children = Children() if counts else None
        if self._children is not None:
            _tell_from_forks(run, self._children.folder)

    def program_ended(self) -> None:
        """Record no more."""
        if os.getpid() == self._process and (self._path is not None or self._fail_on is not None):
            self._document = self._run.end_recording()

    def judge(self) -> None:
        """Raise SystemExit where skips are to end the run with another exit code than the program's own."""
        if os.getpid() != self._process or self._fail_on is None or not self._document:
            return
        found = failures(self._document, self._fail_on)
        if found:
            self.exit_code = FAILED
            say("\n  ".join([f"--fail-on {self._fail_on}:", *found]))
            raise SystemExit(FAILED)

    def tell(self, *, wait: bool = True) -> None:
        """Write the summary and the report.

        Args:
            wait: Whether to wait for children that multiprocessing has not joined yet.
        """
        # Forks inherit exit functions.
        if os.getpid() != self._process:
            return
        if self._children is not None and wait:
            self._children.wait()
        report = self._run.report(self._program, self.exit_code)
        if self._children is not None:
            report = report.with_children(self._children.reports())
        if self._parent is not None:
            ReportWriter(self._parent, lambda: report).write()
        if not (self._quiet or report.is_refusal):
            summary = report.summary()
            say("\n".join(map(folded, summary.splitlines())) if is_read() else summary)
        if self._path is not None:
            try:
                self._write(self._path, report)
            except UsageError as error:
                say(str(error))

    def _write(self, path: Path, report: Report) -> None:
        if self._document:
            write_report(path, [{**self._document, **report.as_dict()}])
        elif is_page(path):
            say("there is no report: the program was not run to its end, or nothing was cast")
        else:
            write_report(path, [report.as_dict()])

    def tell_if_terminated(self) -> None:
        """Write both also where SIGTERM ends this process, which then dies of that signal as it would have.

        A program that handles the signal itself replaces this. Forks die of it at once.
        """
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(TERM) is not signal.SIG_DFL:
            return

        def terminated(number: int, frame: object) -> None:
            # Last words by a thread of their own: the main thread may hold a lock that they need.
            finishing = threading.Thread(target=self._finish, args=(number,), daemon=True)
            finishing.start()
            finishing.join(_LAST_WORDS)
            _die_of(number)

        signal.signal(TERM, terminated)
        if hasattr(os, "register_at_fork"):
            # Only where it is ours still.
            os.register_at_fork(after_in_child=lambda: _restore_default_handler(terminated))

    def _finish(self, number: int) -> None:
        self.exit_code = 128 + number
        self.program_ended()
        self.tell(wait=False)


def _die_of(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _restore_default_handler(handler: Any) -> None:
    if signal.getsignal(TERM) is handler:
        signal.signal(TERM, signal.SIG_DFL)


def _exit_code(error: BaseException) -> int:
    """Return the exit code that Python makes of what a program raised."""
    if isinstance(error, SystemExit):
        code = error.code
        # Of a number, the system keeps 8 bits.
        return code & 0xFF if isinstance(code, int) else 0 if code is None else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1
