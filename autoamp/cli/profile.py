"""`autoamp profile`: a program run in fp32, and what fp16 and bf16 would make of its values."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from autoamp import runtime
from autoamp.cli.launch import Program, prepared, take_path
from autoamp.cli.options import Options
from autoamp.cli.output import say
from autoamp.errors import UsageError

__all__ = ["add_profile", "prepared_profile"]

_HELP = """\
Runs a program in fp32 and tells what of its values fp16 and bf16 could not hold: at each place where an operator is
called and for each parameter's gradient, with the error of the operator in each half dtype, and the loss scales that
lose least. Costs several times the time of a plain run: give it few steps.
"""


def add_profile(commands: Any) -> None:
    """Add the command ``profile`` to a parser's commands."""
    profile = commands.add_parser(
        "profile",
        help="run a program in fp32, and tell what fp16 and bf16 would make of its values",
        description=_HELP,
        usage="autoamp profile [options] script.py args...\n       autoamp profile [options] -m module args...",
    )
    profile.add_argument("--json", metavar="FILE", help="write all of it to this file, as JSON")
    profile.add_argument("--lists", action="append", default=[], metavar="LIST",
                         help="a list set or file, over the project's own; repeatable")  # fmt: skip
    profile.add_argument("--every", type=int, default=1, metavar="N", help="look at every N-th step; default 1")
    profile.add_argument("--device-type", help="whose tensors: cuda, cpu, ...; the accelerator's unless given")
    profile.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    profile.add_argument("program", help="the script, or the module")
    profile.add_argument("args", nargs=argparse.REMAINDER)


def prepared_profile(chosen: argparse.Namespace, argv: Sequence[str]) -> Callable[[], None]:
    """Set this process up, and return a function that runs the program and prints the profile when it has ended.

    Args:
        chosen: What the command line was parsed to.
        argv: The command line, without the name of the command ``autoamp``.

    Raises:
        UsageError: An option is wrong, or there is no such program.
    """
    if argv[len(argv) - len(chosen.args) - 1] == "--":
        chosen.args = ["--", *chosen.args]
    path = None if chosen.json is None else Path(chosen.json).absolute()
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"--json {chosen.json!r} cannot be written: give a file in a directory that exists")
    program = Program(chosen.program, tuple(chosen.args), chosen.is_module)
    take_path(program)
    handle: Any = runtime.init(dtype=torch.float16, device_type=chosen.device_type, lists=chosen.lists or None)
    ranges = handle.profile_ranges(every=chosen.every)
    run_program = prepared(program, Options(opt_level="O0", device_type=chosen.device_type).as_dict())
    process = os.getpid()

    def run() -> None:
        try:
            with ranges:
                run_program()
        finally:
            # A fork of the program that ends here has nothing to tell.
            if os.getpid() == process:
                sys.stdout.write(str(ranges))
                if path is not None:
                    try:
                        path.write_text(ranges.to_json(), encoding="utf-8")
                    except OSError as error:
                        say(f"the profile could not be written: {error}")

    return run
