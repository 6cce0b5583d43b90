"""The command `autoamp` and its options. This file imports no torch, so that help and version come at once."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import pkgutil
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoamp.cli.output import as_typed, is_python, say
from autoamp.errors import AutoampError

# The names of a half dtype.
DTYPES = ("fp16", "float16", "bf16", "bfloat16")

# Each returns the exit code, or a function that runs the program. A command imports only its own module.
_FUNCTIONS = {
    "bisect": "autoamp.cli.searches:bisect",
    "doctor": "autoamp.cli.doctor:doctor",
    "lists": "autoamp.cli.lists:lists",
    "profile": "autoamp.cli.run:prepared_profile",
    "replay": "autoamp.cli.files:replay",
    "report": "autoamp.cli.files:report",
    "run": "autoamp.cli.run:prepared_run",
    "tune": "autoamp.cli.searches:tune",
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
tolerance and by more than the two seeds do, a binary search finds modules and ops that restore it in fp32; those that
overflow are tried first. Prints the lines for autoamp.toml. k of n candidates take at most k (log2(n) + 1) + 5 runs.
"""

_DOCTOR_HELP = """\
Shows the versions, the device with the half dtypes that it has units for, the time of one matrix product in each half
dtype beside fp32, the lists that apply in this folder, and the names that other modules imported from torch. Nothing is
written. The exit code is 1 if a list cannot be used.
"""

_LISTS_HELP = """\
Shows the rules that apply in this folder: ops in half precision first, then those in fp32, those whose arguments are
promoted, banned ones, and ops that are left alone. With names of ops, shows what applies to each, and why.
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
    if argv[0] == "-m" or argv[0].endswith(".py") or is_python(argv[0]):
        # Not imported for a run.
        import shlex

        say(f"{argv[0]!r} is no command; write: autoamp run {shlex.join(argv[is_python(argv[0]) :])}", wrong=True)
        return 2
    chosen = parser().parse_args(argv)
    if "args" in chosen:
        _tell_of_options(chosen)
        if argv[-len(chosen.args) - 1] == "--":
            # argparse drops a "--" that follows the program and is meant for it.
            chosen.args = ["--", *chosen.args]
    try:
        # All that the package offers: handles that are made from here on look on.
        importlib.import_module("autoamp.exports")
        result = pkgutil.resolve_name(_FUNCTIONS[chosen.command])(chosen)
    except AutoampError as error:
        options = {name: f"--{name.replace('_', '-')} " for name in vars(chosen)}
        say(as_typed(error, {**options, "lists": "--set "} if chosen.command == "lists" else options), wrong=True)
        return 2
    if isinstance(result, int):
        return result
    result()
    return 0


def _tell_of_options(chosen: argparse.Namespace) -> None:
    """Tell of options that stand behind a script, and of a level, that the script's text does not have."""
    if chosen.is_module or getattr(chosen, "quiet", False) or os.environ.get("RANK", "0") != "0":
        return
    try:
        source = Path(chosen.program).read_text(encoding="utf-8", errors="ignore")
    except (OSError, ValueError):
        return
    given = [arg.partition("=")[0] for arg in chosen.args if arg.startswith("--")]
    options = vars(chosen).keys() - {"command", "program", "args", "is_module"}
    own = {f"--{before}{name.replace('_', '-')}" for name in options for before in ("", "no-")}
    text = source.replace("_", "-")
    names = [name for name in dict.fromkeys(given) if name in own and name[2:] not in text]
    if names:
        stand = f"{' and '.join(names)} {'stand' if len(names) > 1 else 'stands'} behind {chosen.program}"
        say(f"{stand} and went to it; options of autoamp come before the program")
    level = getattr(chosen, "opt_level", None)
    if level in ("O2", "O3") and chosen.apex and "initialize" not in source:
        why = f"{chosen.program} does not call that itself; leave the option out to cast without a call"
        say(f"--opt-level {level} casts what a program gives to apex's amp.initialize(), and {why}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, from which the documentation has the options."""
    found = argparse.ArgumentParser(prog="autoamp", description="Mixed precision for PyTorch programs.")
    found.add_argument("--version", action="version", version=_version(), help="show the versions and exit")
    commands = found.add_subparsers(dest="command", required=True, metavar="command")
    for add in (_add_run, _add_profile, _add_searches, _add_replay, _add_doctor, _add_lists, _add_report):
        add(commands)
    return found


def _version() -> str:
    """Return the versions of autoamp, torch and Python; nothing is imported for them."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "not found"
    return f"autoamp {sys.modules['autoamp'].__version__} (torch {torch}, Python {platform.python_version()})"


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="run a program unmodified, in mixed precision", description=_RUN_HELP)
    add_casts(
        run, "default: bf16 or fp16 if the device has units for it, else fp32; fp16 for the amp.initialize of a script"
    )
    # Checked where the levels are, so that a digit 0 gets their message.
    run.add_argument("--opt-level", default="O1", metavar="{O0,O1,O2,O3}", help=_LEVEL_HELP)
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
        help="write a report: a page if the name ends in .html, JSON if in .json; implies --trace-overflow, and "
        "samples some steps, which take longer",
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
    which = "run a program in fp32, and show which of its values fp16 and bf16 cannot hold"
    profile = commands.add_parser("profile", help=which, description=_PROFILE_HELP)
    profile.add_argument("--json", metavar="FILE", help="write all results to this file, as JSON")
    add_casts(profile)
    _add_program(profile)


def _add_searches(commands: Any) -> None:
    """Add `tune` and `bisect`, which run a program by several lists."""
    tune = commands.add_parser("tune", help="find the list for a program on this device", description=_TUNE_HELP)
    which = "find which modules and ops must be fp32 for a program's metric"
    bisect = commands.add_parser("bisect", help=which, description=_BISECT_HELP)
    for search, budget in ((tune, "10m"), (bisect, "1h")):
        search.add_argument(
            "--metric", required=True, metavar="NAME",
            help="printed as 'NAME: 0.12' or 'NAME=0.12', or given to autoamp.report_metric(NAME, value); the last "
            "value counts",
        )  # fmt: skip
        search.add_argument("--tolerance", type=float, default=0.02, metavar="PART",
                            help="how much worse than in fp32 the metric may be, relative; default 0.02")  # fmt: skip
        search.add_argument("--budget", default=budget, metavar="TIME", help=f"such as 60s, 10m, 2h; default {budget}")
        search.add_argument("--seed", type=int, default=0, help="the first of the runs' seeds; default 0")
        search.add_argument("--survey-steps", type=int, default=3, metavar="N", help="steps to survey; default 3")
        add_casts(search, "default: bf16 or fp16 if the device has units for it")
    tune.add_argument(
        "--higher-is-better", action="store_true", help="a larger metric is better; default: a smaller one"
    )
    tune.add_argument("--max-error", type=float, default=0.05, metavar="PART",
                      help="an op with a larger relative error in half precision is unsafe; default 0.05")  # fmt: skip
    tune.add_argument("--seeds", type=int, default=2, metavar="N", help="runs of each candidate; default 2")
    tune.add_argument("-o", "--output", default="autoamp.toml", metavar="FILE", help="default: autoamp.toml")
    _add_program(tune, "--metric NAME ")
    _add_program(bisect, "--metric NAME ")


def add_casts(command: argparse.ArgumentParser, dtype: str | None = None) -> None:
    """Add the options that tell what is cast, in which dtype, by which lists.

    Args:
        command: The parser of a command.
        dtype: The help of ``--dtype``; None for a command without it.
    """
    if dtype is not None:
        command.add_argument("--dtype", choices=DTYPES, help=dtype)
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
    which = "run the step of a capsule again, and name the op that overflowed"
    replay = commands.add_parser("replay", help=which, description=_REPLAY_HELP)
    replay.add_argument("capsule", metavar="FILE", help="written by autoamp run --capsule")


def _add_doctor(commands: Any) -> None:
    which = "check the device, the lists, and the names bound before init"
    doctor = commands.add_parser("doctor", help=which, description=_DOCTOR_HELP)
    doctor.add_argument("--quick", action="store_true", help="skip the measurements")
    doctor.add_argument("--device-type", help="cuda, cpu, ...; default: the accelerator")
    doctor.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE",
                        help="import this module first, to see the names that it binds; repeatable")  # fmt: skip
    doctor.add_argument("--consistency", metavar="MODULE:FUNCTION", help=_CONSISTENCY_HELP)


def _add_lists(commands: Any) -> None:
    which = "show each rule with its reason, file and line"
    lists = commands.add_parser("lists", help=which, description=_LISTS_HELP)
    lists.add_argument("ops", nargs="*", metavar="OP", help="show the rules for these ops only, such as softmax")
    lists.add_argument("--set", dest="lists", metavar="SET", help="a list set or file; default: what this project uses")
    lists.add_argument("--dtype", choices=DTYPES, help="the half dtype; default: that of the device")
    lists.add_argument("--device-type", help="the device: cuda, cpu, ...; default: the accelerator")


def _add_report(commands: Any) -> None:
    description = "Makes an HTML page of a file that autoamp run --report FILE.json wrote."
    report = commands.add_parser("report", help="make an HTML page of a run", description=description)
    report.add_argument("run", metavar="RUN.json", help="the file")
    report.add_argument("-o", "--output", default="report.html", metavar="FILE.html", help="default: report.html")
    which = "end with exit code 3 if the run has such skips; see autoamp run"
    report.add_argument("--fail-on", choices=["overflow", "skip"], help=which)
