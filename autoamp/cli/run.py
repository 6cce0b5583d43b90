"""`autoamp run`: its command line, what it tells at the end, and its exit codes."""

from __future__ import annotations

import argparse
import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoamp.cli.launch import Program, prepared, take_path
from autoamp.cli.options import DTYPES, Options
from autoamp.cli.output import say
from autoamp.cli.session import Run, set_up
from autoamp.errors import UsageError
from autoamp.levels import LEVELS

__all__ = ["add_run", "prepared_run", "set_up_child"]


_RUN_HELP = """\
Runs a program unmodified, in mixed precision. Torch is patched by the cast lists before the program's first import.
What its modules compute is cast; tables, statistics and preprocessing stay as they are. In fp16 its losses are scaled,
its gradients unscaled before its own code sees them, and steps that overflow skipped. A program that does this by
itself (apex, torch.amp, half-precision models) is left to do so: `import apex` finds autoamp.
"""

_LEVEL_HELP = """\
O1 (default): patch torch. O0: fp32, for comparison. O2, O3: half-precision models; as they need the model, they act
where the program gives it to apex's amp.initialize() without naming a level, and nothing is cast until then
"""


def add_run(commands: Any) -> None:
    """Add the command ``run`` to a parser's commands."""
    run = commands.add_parser(
        "run",
        help="run a program unmodified, in mixed precision",
        description=_RUN_HELP,
        usage="autoamp run [options] script.py args...\n       autoamp run [options] -m module args...",
    )
    run.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="default: bf16 where the device has units for it, else fp16; fp16 for a program of Apex",
    )
    run.add_argument("--device-type", help="whose tensors are cast: cuda, cpu, ...; the accelerator's unless given")
    run.add_argument("--lists", action="append", default=[], metavar="LIST",
                     help="a list set or file, over the project's own; repeatable")  # fmt: skip
    run.add_argument("--opt-level", default="O1", choices=list(LEVELS), help=_LEVEL_HELP)
    run.add_argument(
        "--loss-scale",
        metavar="SCALE",
        help="'dynamic' or a number, for an amp.initialize() that names none too; default: dynamic, and 1 for bf16",
    )
    run.add_argument("--no-apex", dest="apex", action="store_false", help="do not let `import apex` find autoamp")
    run.add_argument("--shadow-apex", action="store_true", help="hide a real apex that is installed")
    run.add_argument("--fastai1", action="store_true", help="let fastai 1.0.61 run on today's torch")
    run.add_argument(
        "--trace-overflow", action="store_true", help="tell for each skipped step what overflowed, on standard error"
    )
    run.add_argument("--report", metavar="FILE", help="write how it went to this file, as JSON")
    run.add_argument("--quiet", action="store_true", help="no summary at the end")
    run.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    run.add_argument("program", help="the script, or the module")
    # Whatever follows is the program's own.
    run.add_argument("args", nargs=argparse.REMAINDER)


def prepared_run(chosen: argparse.Namespace, argv: Sequence[str]) -> Callable[[], None]:
    """Set this process up, and return a function that runs the program and notes its exit code.

    Args:
        chosen: What the command line was parsed to.
        argv: The command line, without the name of the command ``autoamp``.

    Raises:
        UsageError: An option is wrong, or there is no such program.
        ListFileError: A list cannot be used.
    """
    # argparse keeps a "--" that follows the program for itself.
    if argv[len(argv) - len(chosen.args) - 1] == "--":
        chosen.args = ["--", *chosen.args]
    options = Options.of(vars(chosen))
    path = None if chosen.report is None else Path(chosen.report).absolute()
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"--report {chosen.report!r} cannot be written: give a file in a directory that exists")
    program = Program(chosen.program, tuple(chosen.args), chosen.is_module)
    # The program's own path first: it decides what `apex` is, and a package is imported to find its module.
    take_path(program)
    first = os.environ.get("RANK", "0") == "0"
    run = set_up(options, count=first and (path is not None or not chosen.quiet))
    run_program = prepared(program, options.as_dict())
    if run.real_apex is not None and first:
        say(f"a real apex is installed ({run.real_apex}) and takes the imports; --shadow-apex hides it")
    end = _End(run, [chosen.program, *chosen.args], path if first else None, quiet=chosen.quiet or not first)
    # Python runs this after the traceback and after the program's own exit functions.
    atexit.register(end.tell)

    def run_and_note() -> None:
        try:
            run_program()
        except BaseException as error:
            end.exit_code = _exit_code(error)
            raise

    return run_and_note


def set_up_child(options: Mapping[str, Any]) -> None:
    """Set up a process that a program under `autoamp run` started, as the program's own was."""
    set_up(Options.of(options))


class _End:
    """Writes the summary and the report when the program has ended, in the process that began it."""

    def __init__(self, run: Run, program: list[str], path: Path | None, *, quiet: bool) -> None:
        self.exit_code = 0
        self._run = run
        self._program = program
        self._path = path
        self._quiet = quiet
        self._process = os.getpid()

    def tell(self) -> None:
        """Write the summary and the report."""
        # Forks inherit exit functions.
        if os.getpid() != self._process:
            return
        report = self._run.report(self._program, self.exit_code)
        if not self._quiet:
            say(report.summary())
        if self._path is not None:
            try:
                self._path.write_text(report.as_json(), encoding="utf-8")
            except OSError as error:
                say(f"the report could not be written: {error}")


def _exit_code(error: BaseException) -> int:
    """Return the exit code that Python makes of what a program raised."""
    if isinstance(error, SystemExit):
        code = error.code
        # Of a number, the system keeps 8 bits.
        return code & 0xFF if isinstance(code, int) else 0 if code is None else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1
