"""The command `autoamp` and its options. This file imports no torch, so that help and version come at once."""

from __future__ import annotations

import argparse
import importlib.util
import pkgutil
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoamp.cli.output import say
from autoamp.errors import AutoampError

DTYPES = ("fp16", "float16", "bf16", "bfloat16")
LEVELS = ("O0", "O1", "O2", "O3")

# Each returns the exit code, or a function that runs the program. A command imports only its own module.
_FUNCTIONS = {
    "bisect": "autoamp.cli.bisect:bisect",
    "doctor": "autoamp.cli.doctor:doctor",
    "lists": "autoamp.cli.lists:lists",
    "profile": "autoamp.cli.profile:prepared_profile",
    "replay": "autoamp.cli.replay:replay",
    "report": "autoamp.cli.reports:report",
    "run": "autoamp.cli.run:prepared_run",
    "tune": "autoamp.cli.tune:tune",
}

_RUN_HELP = """\
Runs an unmodified program in mixed precision. autoamp patches torch before the program's first import. Ops inside
module calls are cast by the cast lists; code outside of modules is not. In fp16 losses are scaled, gradients are
unscaled before the program reads them, and steps that overflow are skipped. A program with its own mixed precision
(torch.amp, FP16_Optimizer, half-precision models) keeps control of it. `import apex` finds autoamp.
"""

_LEVEL_HELP = """\
O1 (default): patch torch. O0: fp32, for comparison. O2, O3: half-precision models; they only apply if the program
calls apex's amp.initialize() without a level, and nothing is cast before that call
"""

_FAIL_HELP = """\
end with exit code 3 if the program itself succeeds, but something went wrong. 'overflow': the loss, the gradients or
the outputs of an inference were inf or nan, and the search for the loss scale does not explain it, because the loss
itself was inf or nan, the loss scale was 1 or fixed, or the cause was found. 'skip': a step was skipped. Both: an op
overflowed in a step that was taken, and changed its gradients. Implies --trace-overflow
"""

_NONFINITE_HELP = """\
what happens to a step whose gradients hold inf or nan, if its loss is not scaled (bf16, fp32, a loss scale of 1): take
all, and warn of the first one (warn, the default), end the program with an error before it (raise), or skip it (skip).
raise and skip wait for a GPU at each step. If the loss is scaled, such a step is always skipped
"""

_CAPSULE_HELP = """\
write the first step of each cause of inf or nan to a file in this folder, for autoamp replay: it holds the weights and
inputs of the step; implies --trace-overflow
"""

_PROFILE_HELP = """\
Runs a program in fp32 and counts the values that fp16 and bf16 cannot hold: for each line that calls an operator, and
for each parameter's gradient. Also shows the error of each operator in both dtypes, and the loss scales that lose the
fewest gradients. Takes several times as long as a plain run: give it few steps.
"""

_TUNE_HELP = """\
Measures the time of each op of a program in half precision and in fp32 on this device, and finds ops that overflow in
half precision. Then runs the program with changed lists, and keeps a change if the metric stays within the tolerance of
that in fp32. Writes the best list when the budget is spent, or after Ctrl-C or SIGTERM, each entry with its reason.
"""

_BISECT_HELP = """\
Runs a program in fp32 with two seeds, and in half precision. If the metric in half precision differs by more than the
tolerance and by more than the two seeds do, a binary search finds the modules and ops that must be fp32 to restore it.
Prints the lines for autoamp.toml. k culprits among n candidates take at most k (log2(n) + 1) + 5 runs.
"""

_CONSISTENCY_HELP = """\
call this function, which returns a model and its inputs, and compare what the model computes in training, without
gradients, in checkpoints and in compiled code; exit 1 if it differs, 4 if a path could not be compared. See
handle.consistency
"""

_REPLAY_HELP = """\
Runs the step in a file of `autoamp run --capsule DIR` again, and names the op that made inf or nan. The exit code is 0
if it is the op that the run named, else 1. Nothing of the program is needed, and no code in the file runs.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. An exception of a program propagates."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv:
        parser().print_help()
        return 0
    chosen = parser().parse_args(argv)
    if "args" in chosen and argv[-len(chosen.args) - 1] == "--":
        # argparse drops a "--" that follows the program and is meant for it.
        chosen.args = ["--", *chosen.args]
    try:
        result = pkgutil.resolve_name(_FUNCTIONS[chosen.command])(chosen)
    except AutoampError as error:
        say(str(error), wrong=True)
        return 2
    if isinstance(result, int):
        return result
    result()
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, from which the documentation has the options."""
    found = argparse.ArgumentParser(prog="autoamp", description="Mixed precision for PyTorch programs.")
    found.add_argument("--version", action="version", version=_version(), help="show the versions and exit")
    commands = found.add_subparsers(dest="command", required=True, metavar="command")
    for add in (_add_run, _add_profile, _add_tune, _add_bisect, _add_replay, _add_doctor, _add_lists, _add_report):
        add(commands)
    return found


def _version() -> str:
    """Return the versions of autoamp, torch and Python; nothing is imported for them."""
    found = importlib.util.find_spec("torch")
    torch = None if found is None or found.origin is None else _version_in(Path(found.origin).with_name("version.py"))
    ours = sys.modules["autoamp"].__version__
    return f"autoamp {ours} (torch {torch or 'not found'}, Python {platform.python_version()})"


def _version_in(file: Path) -> str | None:
    try:
        found = re.search(r"^__version__ = [\"']([^\"']+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else found[1]


def _add_run(commands: Any) -> None:
    """Add the command ``run`` to a parser's commands."""
    run = commands.add_parser(
        "run",
        help="run a program unmodified, in mixed precision",
        description=_RUN_HELP,
    )
    run.add_argument(
        "--dtype",
        choices=DTYPES,
        help="default: bf16 or fp16 if the device has units for it, else fp32; fp16 for a script that imports apex",
    )
    _add_device_and_lists(run)
    run.add_argument("--opt-level", default="O1", choices=LEVELS, help=_LEVEL_HELP)
    run.add_argument(
        "--loss-scale",
        metavar="SCALE",
        help="'dynamic' or a number; default: dynamic, and 1 for bf16. Also applies to an amp.initialize() without one",
    )
    run.add_argument("--no-apex", dest="apex", action="store_false", help="do not let `import apex` find autoamp")
    run.add_argument("--shadow-apex", action="store_true", help="hide an installed apex of NVIDIA")
    run.add_argument("--fastai1", action="store_true", help="let fastai 1.0.61 run on the installed torch")
    run.add_argument(
        "--trace-overflow", action="store_true", help="log for each skipped step what overflowed, on standard error"
    )
    run.add_argument("--capsule", metavar="DIR", help=_CAPSULE_HELP)
    run.add_argument(
        "--report",
        metavar="FILE",
        help="write a report: a page if the name ends in .html, else JSON; implies --trace-overflow, and samples some "
        "steps, which take longer",
    )
    run.add_argument("--fail-on", choices=["overflow", "skip"], help=_FAIL_HELP)
    run.add_argument(
        "--keep-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on a CPU with glibc, keep freed memory for the next step (default); see autoamp.keep_freed_memory",
    )
    run.add_argument("--on-nonfinite", default="warn", choices=["warn", "raise", "skip"], help=_NONFINITE_HELP)
    run.add_argument("--quiet", action="store_true", help="no summary at the end")
    _add_program(run)


def _add_profile(commands: Any) -> None:
    """Add the command ``profile`` to a parser's commands."""
    profile = commands.add_parser(
        "profile",
        help="run a program in fp32, and show which of its values fp16 and bf16 cannot hold",
        description=_PROFILE_HELP,
    )
    profile.add_argument("--json", metavar="FILE", help="write all results to this file, as JSON")
    _add_device_and_lists(profile)
    _add_program(profile)


def _add_tune(commands: Any) -> None:
    """Add the command ``tune`` to a parser's commands."""
    tune = _searching(commands, "tune", "find the list for a program on this device", _TUNE_HELP, budget="10m")
    tune.add_argument(
        "--higher-is-better", action="store_true", help="a larger metric is better; default: a smaller one"
    )
    tune.add_argument("--max-error", type=float, default=0.05, metavar="PART",
                      help="an op with a larger relative error in half precision is unsafe; default 0.05")  # fmt: skip
    tune.add_argument("--seeds", type=int, default=2, metavar="N", help="runs of each candidate; default 2")
    tune.add_argument("-o", "--output", default="autoamp.toml", metavar="FILE", help="default: autoamp.toml")
    _add_program(tune, "--metric NAME ")


def _add_bisect(commands: Any) -> None:
    """Add the command ``bisect`` to a parser's commands."""
    which = "find which modules and ops must be fp32 for a program's metric"
    _add_program(_searching(commands, "bisect", which, _BISECT_HELP, budget="1h"), "--metric NAME ")


def _searching(commands: Any, name: str, which: str, description: str, *, budget: str) -> argparse.ArgumentParser:
    """Add a command that runs a program by several lists, with the options of all of these."""
    found: argparse.ArgumentParser = commands.add_parser(
        name,
        help=which,
        description=description,
    )
    found.add_argument("--metric", required=True, metavar="NAME",
                       help="printed as 'NAME: 0.12' or 'NAME=0.12', given to autoamp.report_metric(NAME, value), or a "
                       "variable of the script; the last value counts")  # fmt: skip
    found.add_argument("--tolerance", type=float, default=0.02, metavar="PART",
                       help="how much worse than in fp32 the metric may be, relative; default 0.02")  # fmt: skip
    found.add_argument("--budget", default=budget, metavar="TIME", help=f"such as 60s, 10m, 2h; default {budget}")
    found.add_argument("--seed", type=int, default=0, help="the first of the runs' seeds; default 0")
    found.add_argument("--survey-steps", type=int, default=3, metavar="N", help="steps that are surveyed; default 3")
    found.add_argument("--dtype", choices=DTYPES, help="default: bf16 or fp16 if the device has units for it")
    _add_device_and_lists(found)
    return found


def _add_device_and_lists(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device-type", help="whose tensors are cast: cuda, cpu, ...; default: the accelerator")
    command.add_argument("--lists", action="append", default=[], metavar="LIST",
                         help="a list set or file, over the project's own; repeatable")  # fmt: skip


def _add_program(command: argparse.ArgumentParser, needed: str = "") -> None:
    """Add the program that a command runs, which ends its options."""
    begin = f"{command.prog} {needed}[options]"
    command.usage = f"{begin} script.py args...\n       {begin} -m module args..."
    command.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    command.add_argument("program", help="the script, or the module")
    # Whatever follows is the program's own.
    command.add_argument("args", nargs=argparse.REMAINDER).required = False


def _add_replay(commands: Any) -> None:
    """Add the command ``replay`` to a parser's commands."""
    replay = commands.add_parser(
        "replay",
        help="run the step of a capsule again, and name the op that overflowed",
        description=_REPLAY_HELP,
    )
    replay.add_argument("capsule", metavar="FILE", help="written by autoamp run --capsule")


def _add_doctor(commands: Any) -> None:
    """Add the command ``doctor`` to a parser's commands."""
    doctor = commands.add_parser("doctor", help="check the device, the lists, and the names bound before init")
    doctor.add_argument("--quick", action="store_true", help="skip the measurements")
    doctor.add_argument("--device-type", help="cuda, cpu, ...; default: the accelerator")
    doctor.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE",
                        help="import this module first, to see the names that it binds; repeatable")  # fmt: skip
    doctor.add_argument("--consistency", metavar="MODULE:FUNCTION", help=_CONSISTENCY_HELP)


def _add_lists(commands: Any) -> None:
    """Add the command ``lists`` to a parser's commands."""
    lists = commands.add_parser("lists", help="show each rule with its reason, file and line")
    lists.add_argument("ops", nargs="*", metavar="OP", help="show the rules for these ops only, such as softmax")
    lists.add_argument("--set", default=None, help="a list set or file; default: what this project uses")
    lists.add_argument("--dtype", choices=DTYPES, help="the half dtype; default: that of the device")
    lists.add_argument("--device-type", help="the device: cuda, cpu, ...; default: the accelerator")
    lists.add_argument("--check", action="store_true",
                       help="compare the shipped sets with the installed torch, exit 1 if they differ; and the "
                       "lists in use with its autocast")  # fmt: skip


def _add_report(commands: Any) -> None:
    """Add the command ``report`` to a parser's commands."""
    report = commands.add_parser(
        "report",
        help="make an HTML page of a run",
        description="Makes an HTML page of a file that autoamp run --report FILE.json wrote.",
    )
    report.add_argument("run", metavar="RUN.json", help="the file")
    report.add_argument("-o", "--output", default="report.html", metavar="FILE.html", help="default: report.html")
    report.add_argument(
        "--fail-on",
        choices=["overflow", "skip"],
        help="end with exit code 3 if the run has such skips; see autoamp run",
    )
