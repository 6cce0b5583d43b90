"""`autoamp run`: runs a program in mixed precision, with a summary, a report and exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoamp.cli.children import ChildReports, make_folder, parents_folder, take_reports, write_child_report
from autoamp.cli.launch import Program, prepared, take_path
from autoamp.cli.options import Options
from autoamp.cli.output import say, writable
from autoamp.cli.report import Report
from autoamp.cli.reports import FAILED
from autoamp.cli.session import Run, set_up
from autoamp.compat import added_to_real_apex
from autoamp.diagnostics import check_report_tools, failures, is_page, write_report
from autoamp.errors import UsageError

# Seconds for the summary and the report after SIGTERM.
_LAST_WORDS = 10.0


def prepared_run(chosen: argparse.Namespace) -> Callable[[], None]:
    """Set this process up, and return a function that runs the program and notes its exit code.

    Args:
        chosen: The parsed command line.

    Raises:
        UsageError: An option is wrong, or there is no such program.
        ListFileError: A list cannot be used.
    """
    if chosen.is_module and chosen.program in ("torch.distributed.run", "torch.distributed.launch"):
        raise UsageError(
            f"autoamp run -m {chosen.program} would not reach the processes that it starts; "
            "use torchrun [its options] -m autoamp run [options] script.py"
        )
    options = Options.from_mapping(vars(chosen))
    judged, reports = chosen.fail_on is not None, chosen.report is not None
    if judged or reports:
        # On every rank: either all ranks trace, or none.
        options = dataclasses.replace(options, trace_overflow=True)
    path = writable("--report", chosen.report) if reports else None
    if path is not None and is_page(path):
        check_report_tools()
    program = Program(chosen.program, tuple(chosen.args), chosen.is_module)
    # The program's own path first: it decides what `apex` is, and a package is imported to find its module.
    take_path(program)
    first = os.environ.get("RANK", "0") == "0"
    reports, speaks, parent = reports and first, not chosen.quiet and first, parents_folder()
    counts = reports or speaks or parent is not None
    # --fail-on needs no sampled steps.
    run = set_up(options, count=counts, record=judged or reports, sample=reports)
    try:
        run_program = prepared(program, run.options.as_dict())
    except BaseException:
        run.abandon()
        raise
    if run.real_apex is not None and first:
        added = added_to_real_apex()
        what = f"autoamp adds what it lacks: {', '.join(added)}" if "amp" in added else "it takes the imports"
        say(f"a real apex is installed ({run.real_apex}); {what}; --shadow-apex hides it")
    end = _RunEnd(run, chosen, path if first else None, parent, counts=counts, quiet=not speaks)
    # This runs after the program's own exit functions, and after multiprocessing has joined its children.
    multiprocessing.util.Finalize(None, end.tell, exitpriority=-100)
    end.tell_if_terminated()

    def run_and_note() -> None:
        try:
            run_program()
        except BaseException as error:
            end.program_ended(_exit_code(error))
            raise
        end.program_ended(0)

    return run_and_note


def set_up_child(options: Mapping[str, Any]) -> None:
    """Set up a process that a program under `autoamp run` started, as the program's own was."""
    folder = parents_folder()
    run = set_up(Options.from_mapping(options), count=folder is not None)
    if folder is not None:
        ChildReports(run, folder).write_at_end()


class _RunEnd:
    """Writes the summary and the report when the program has ended, in the process that began it."""

    def __init__(
        self, run: Run, chosen: argparse.Namespace, path: Path | None, parent: Path | None, *, counts: bool, quiet: bool
    ) -> None:
        self._run = run
        self._chosen = chosen
        self._path = path
        self._parent = parent
        self._quiet = quiet
        self._process = os.getpid()
        self._exit_code = 0
        self._document: dict[str, Any] = {}
        self._children = make_folder() if counts else None
        if self._children is not None:
            ChildReports(run, self._children)

    def program_ended(self, exit_code: int) -> None:
        """Stop recording.

        Raises:
            SystemExit: The program succeeded, and ``--fail-on`` found skips.
        """
        self._exit_code = exit_code
        if os.getpid() != self._process:
            return
        self._document = self._run.end_recording()
        fail_on = self._chosen.fail_on
        if exit_code == 0 and fail_on is not None and self._document:
            found = failures(self._document, fail_on)
            if found:
                self._exit_code = FAILED
                say("\n  ".join([f"--fail-on {fail_on}:", *found]))
                raise SystemExit(FAILED)

    def tell(self) -> None:
        """Write the summary and the report."""
        report = self._run.report([self._chosen.program, *self._chosen.args], self._exit_code)
        if self._children is not None:
            report = report.with_children(take_reports(self._children))
        if self._parent is not None:
            write_child_report(self._parent, report)
        if not (self._quiet or report.is_refusal):
            say(report.summary())
        if self._path is not None:
            try:
                self._write(self._path, report)
            except UsageError as error:
                say(str(error))

    def _write(self, path: Path, report: Report) -> None:
        if self._document or not is_page(path):
            write_report(path, {**self._document, **report.as_dict()})
        else:
            say("there is no report: the program was not run to its end, or nothing was cast")

    def tell_if_terminated(self) -> None:
        """Write both also after SIGTERM. The process then dies of that signal, as it would have.

        A program that handles the signal itself replaces this handler.
        """
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, number: int, frame: object) -> None:
        if os.getpid() == self._process:
            # In a thread of its own: the main thread may hold a lock that this needs.
            finishing = threading.Thread(target=self._finish, args=(128 + number,), daemon=True)
            finishing.start()
            finishing.join(_LAST_WORDS)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _finish(self, exit_code: int) -> None:
        self.program_ended(exit_code)
        self.tell()


def _exit_code(error: BaseException) -> int:
    """Return the exit code that Python makes of an exception of the program."""
    if isinstance(error, SystemExit):
        code = error.code
        # Of a number, the system keeps 8 bits.
        return code & 0xFF if isinstance(code, int) else 0 if code is None else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1
