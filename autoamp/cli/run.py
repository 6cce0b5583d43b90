"""`autoamp run` and `autoamp profile`: they run a program, and tell at its end how it went."""

from __future__ import annotations

import argparse
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from autoamp.apex.alias import added_to_real_apex, real_apex
from autoamp.cli.launch import prepared, take_path
from autoamp.cli.output import say, writable
from autoamp.cli.session import Options, Run, set_up
from autoamp.core import Settings, check_device, set_handle
from autoamp.errors import UsageError
from autoamp.tools import Handle, check_report_tools, failures, is_page, page_template, write_report

# The exit code where ``--fail-on`` found something.
FAILED = 3
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
    launchers = ("torch.distributed.run", "torch.distributed.launch") if chosen.is_module else ("torchrun",)
    if chosen.program in launchers:
        raise UsageError(
            f"autoamp run {'-m ' * chosen.is_module}{chosen.program} would not reach the processes that it starts; "
            "use torchrun [its options] -m autoamp run [options] script.py"
        )
    options, first = Options.from_command_line(chosen), os.environ.get("RANK", "0") == "0"
    # Either all ranks trace, or none. The first one alone speaks.
    traces = options.trace_overflow or chosen.fail_on is not None or chosen.report is not None
    options = replace(options, trace_overflow=traces, quiet=options.quiet or not first)
    path = None if chosen.report is None else writable("--report", chosen.report)
    if path is not None and is_page(path):
        check_report_tools()
    elif path is not None and path.suffix.lower() != ".json":
        raise UsageError(f"--report {chosen.report!r} must end in .html for a page, or in .json")
    # The program's own path first: it decides what `apex` is, and a package is imported to find its module.
    take_path(chosen)
    path = path if first else None
    # --fail-on needs no sampled steps.
    run = set_up(options, record=path is not None or chosen.fail_on is not None, sample=path is not None)
    run_program = prepared(chosen, asdict(run.options))
    real = real_apex()
    if first and real is not None and options.apex and not options.shadow_apex:
        added = added_to_real_apex()
        what = f"autoamp adds what it lacks: {', '.join(added)}" if "amp" in added else "it takes the imports"
        say(f"a real apex is installed ({real}); {what}; --shadow-apex hides it")
    end = _RunEnd(run, chosen, path)

    def run_and_note() -> None:
        try:
            run_program()
        except BaseException as error:
            end.program_ended(_exit_code(error))
            raise
        end.program_ended(0)

    return run_and_note


def prepared_profile(chosen: argparse.Namespace) -> Callable[[], None]:
    """Set this process up, and return a function that runs the program and prints the profile when it has ended.

    Args:
        chosen: The parsed command line.

    Raises:
        UsageError: An option is wrong, or there is no such program.
        ListFileError: A list cannot be used.
    """
    path = None if chosen.json is None else writable("--json", chosen.json)
    take_path(chosen)
    settings = Settings.from_arguments(chosen.lists or None, chosen.device_type, torch.float16)
    check_device(settings.device_type)
    handle: Any = Handle(settings)
    set_handle(handle)
    ranges = handle.profile_ranges()
    run_program = prepared(chosen, asdict(Options(opt_level="O0", device_type=chosen.device_type)))
    process = os.getpid()

    def run() -> None:
        try:
            with ranges:
                run_program()
        finally:
            # Forks of the program end here too.
            if os.getpid() == process:
                sys.stdout.write(str(ranges))
                if path is not None:
                    path.write_text(ranges.to_json(), encoding="utf-8")

    return run


class _RunEnd:
    """Writes the summary and the report when the program has ended, in the process that began it."""

    def __init__(self, run: Run, chosen: argparse.Namespace, path: Path | None) -> None:
        self._run = run
        self._chosen = chosen
        self._path = path
        self._process = os.getpid()
        self._exit_code = 0
        self._document: dict[str, Any] = {}
        # This runs after the program's own exit functions, and after multiprocessing has joined its children.
        multiprocessing.util.Finalize(None, self.tell, exitpriority=-100)
        # A program that handles the signal itself replaces this handler.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)

    def program_ended(self, exit_code: int) -> None:
        """Stop recording.

        Raises:
            SystemExit: The program succeeded, and ``--fail-on`` found skips.
        """
        self._exit_code = exit_code
        if os.getpid() != self._process:
            return
        if exit_code and self._path is not None and is_page(self._path):
            # Python forgets that Ctrl-C ended the program, and with which exit code, where code is compiled later.
            page_template()
        fail_on = self._chosen.fail_on
        self._document = {} if fail_on is None and self._path is None else self._run.end_recording()
        found = failures(self._document, fail_on) if exit_code == 0 and fail_on and self._document else []
        if found:
            self._exit_code = FAILED
            say("\n  ".join([f"--fail-on {fail_on}:", *found]))
            raise SystemExit(FAILED)

    def tell(self) -> None:
        """Write the summary and the report."""
        report = self._run.report([self._chosen.program, *self._chosen.args], self._exit_code)
        # A program that refuses its command line ends with 2, and has not begun.
        if not (self._run.options.quiet or (self._exit_code == 2 and report.is_idle)):
            for line in report.summary():
                say(line)
        if self._path is None:
            return
        if is_page(self._path) and not self._document:
            say("there is no report: the program was not run to its end, or nothing was cast")
            return
        try:
            write_report(self._path, {**self._document, **vars(report)})
            if not self._run.options.quiet:
                say(f"report written to {self._chosen.report}")
        except UsageError as error:
            say(str(error))

    def _terminated(self, number: int, frame: object) -> None:
        """Write both also after SIGTERM. The process then dies of that signal, as it would have."""
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
