"""The command ``autoamp``: run a program as it is, look at the device, show the lists."""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoamp.cli import probes
from autoamp.cli.launch import Program, prepared, take_path
from autoamp.cli.session import DTYPES, Options, Run, set_up
from autoamp.diagnostics import check_lists
from autoamp.errors import AutoampError, UsageError
from autoamp.levels import LEVELS

__all__ = ["main", "set_up_child"]

# -- output --


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, its columns of one width each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def say(line: str) -> None:
    """Tell the user a line, on stderr."""
    try:
        sys.stderr.write(line if line.startswith("autoamp: ") else f"autoamp: {line}")
        sys.stderr.write("\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # No stderr, or a closed one: nobody is listening.
        pass


# -- run --

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
    run.add_argument("--report", metavar="FILE", help="write how it went to this file, as JSON")
    run.add_argument("--quiet", action="store_true", help="no summary at the end")
    run.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    run.add_argument("program", help="the script, or the module")
    # Whatever follows is the program's own.
    run.add_argument("args", nargs=argparse.REMAINDER)


def prepared_run(chosen: argparse.Namespace, argv: Sequence[str]) -> Callable[[], None]:
    """Set this process up and return what runs the program; ``chosen`` is what ``argv`` was parsed to."""
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
    """What is told when the program has ended, by the process that began it."""

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


# -- lists --


def add_lists(commands: Any) -> None:
    """Add the command ``lists`` to a parser's commands."""
    lists = commands.add_parser("lists", help="show each rule and where it comes from")
    lists.add_argument("--set", default=None, help="a list set or file; default: what this project uses")
    lists.add_argument("--device-type", help="for which device: cuda, cpu, ...; the accelerator's unless given")
    lists.add_argument("--check", action="store_true",
                       help="compare the shipped sets with the installed torch; exit 1 where they differ")  # fmt: skip
    lists.set_defaults(act=_lists)


def _lists(chosen: argparse.Namespace) -> int:
    if chosen.check:
        drift = check_lists()
        sys.stdout.write("".join(f"{line}\n" for line in drift.lines()))
        if not drift:
            header = "its autocast header" if drift.header else "no autocast header, as it was installed without"
            sys.stdout.write(f"the shipped lists agree with torch {drift.torch}: its public names, {header}\n")
        return int(bool(drift))
    rules = probes.default_table(chosen.set, chosen.device_type).rules
    rows = sorted((rule.target, rule.policy.value, str(rule.origin)) for rule in rules)
    sys.stdout.write("".join(f"{line}\n" for line in aligned(rows)))
    return 0


# -- doctor --


def add_doctor(commands: Any) -> None:
    """Add the command ``doctor`` to a parser's commands."""
    doctor = commands.add_parser("doctor", help="look at the device, the lists and the names taken before init")
    doctor.add_argument("--quick", action="store_true", help="measure nothing")
    doctor.add_argument("--json", action="store_true", help="print a JSON object")
    doctor.add_argument("--device-type", help="cuda, cpu, ...; the accelerator's unless given")
    doctor.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE",
                        help="import this first, to see the names that it takes; repeatable")  # fmt: skip
    doctor.set_defaults(act=_doctor)


def _doctor(chosen: argparse.Namespace) -> int:
    sys.path[:0] = [] if sys.flags.safe_path or os.getcwd() in sys.path else [os.getcwd()]
    for module in chosen.imports:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise UsageError(f"--import {module}: {type(error).__name__}: {error}") from error
    device = probes.device_of(chosen.device_type)
    found: dict[str, Any] = {
        "packages": probes.packages(),
        "device": dataclasses.asdict(device),
        "lists": dataclasses.asdict(probes.lists_of(device.kind)),
        "names": dataclasses.asdict(probes.bound_names()),
    }
    measured = [] if chosen.quick else probes.measure(device.kind)
    found["measured"] = [{**dataclasses.asdict(one), "verdict": one.verdict} for one in measured if one.dtype != "fp32"]
    if chosen.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    for heading, lines in _sections(found, measured):
        sys.stdout.write(f"{heading}\n" + "".join(f"  {line}\n" for line in lines) + "\n")
    return 0


def _sections(found: Mapping[str, Any], measured: Sequence[probes.Measured]) -> list[tuple[str, list[str]]]:
    packages, device, lists, names = found["packages"], found["device"], found["lists"], found["names"]
    sections = [
        ("Packages", aligned([
            ("autoamp", packages["autoamp"]), ("torch", packages["torch"]), ("Python", packages["python"]),
            ("kernels", packages["kernels"] or "autoamp_kernels is not installed; torch's own operations are used"),
            ("apex", packages["apex"] or "no real apex; `autoamp run` lets `import apex` find autoamp"),
        ])),
        ("Device", aligned([
            (device["kind"], device["name"]), ("half units", device["units"]),
            ("default dtype", f"{device['default']}; {device['run_default']} for `autoamp run`"),
            ("fp32 matmul", f"precision {device['fp32_matmul']!r}"),
        ])),
    ]  # fmt: skip
    if measured:
        sections.append((_measured_heading(measured[0]), _measured_lines(measured)))
    files = [(f"{count} rules", path) for path, count in lists["used"].items()]
    sections.append(("Lists", aligned([
        ("shipped sets", ", ".join(lists["shipped"])), ("AUTOAMP_LISTS", lists["environment"] or "not set"), *files,
        *([("lacking here", ", ".join(lists["lacking"]))] if lists["lacking"] else []),
        *([("not imported", ", ".join(lists["waiting"]))] if lists["waiting"] else []),
    ])))  # fmt: skip
    sections.append(("Names bound before init", _name_lines(names)))
    return sections


def _measured_heading(one: probes.Measured) -> str:
    return (
        f"Measured: matmul of {one.size} x {one.size}, elementwise op on {one.elements / 1e6:.0f} million "
        "(median, quartiles)"
    )


def _measured_lines(measured: Sequence[probes.Measured]) -> list[str]:
    unit, factor = ("TFLOP/s", 1e12) if measured[0].flops.median > 1e12 else ("GFLOP/s", 1e9)
    rows = [("", unit, "", "GB/s", "")]
    for one in measured:
        rows.append((one.dtype, *_cells(one.flops, factor), *_cells(one.bytes, 1e9)))
    return [*aligned(rows), "", *(one.verdict for one in measured if one.dtype != "fp32")]


def _cells(spread: probes.Spread, factor: float) -> tuple[str, str]:
    return f"{spread.median / factor:.1f}", f"({spread.low / factor:.1f} to {spread.high / factor:.1f})"


def _name_lines(names: Mapping[str, Sequence[str]]) -> list[str]:
    lines = []
    for found, what in (
        (names["rebound"], "are rebound by init"),
        (names["unreached"], "keep torch's own: init does not reach them"),
    ):
        lines.append(f"{len(found)} {what}" + (":" if found else ""))
        lines += [f"  {name}" for name in found]
    return lines


# -- the command line --


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code; what a program raises goes on."""
    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = _parser().parse_args(argv)
    try:
        if chosen.command == "run":
            program = prepared_run(chosen, argv)
        else:
            return int(chosen.act(chosen))
    except AutoampError as error:
        say(str(error))
        return 2
    program()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autoamp", description="Mixed precision for PyTorch programs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_run(commands)
    add_doctor(commands)
    add_lists(commands)
    return parser
