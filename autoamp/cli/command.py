"""The command `autoamp` and its subcommands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from autoamp.cli.doctor import add_doctor
from autoamp.cli.lists import add_lists
from autoamp.cli.output import say
from autoamp.cli.profile import add_profile, prepared_profile
from autoamp.cli.reports import add_report
from autoamp.cli.run import add_run, prepared_run
from autoamp.cli.tune import add_tune
from autoamp.errors import AutoampError

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code; what a program raises goes on."""
    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = parser().parse_args(argv)
    try:
        if chosen.command == "run":
            program = prepared_run(chosen, argv)
        elif chosen.command == "profile":
            program = prepared_profile(chosen, argv)
        else:
            return int(chosen.act(chosen))
    except AutoampError as error:
        say(str(error))
        return 2
    program()
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, from which the documentation has the options."""
    parser = argparse.ArgumentParser(prog="autoamp", description="Mixed precision for PyTorch programs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_run(commands)
    add_profile(commands)
    add_tune(commands)
    add_doctor(commands)
    add_lists(commands)
    add_report(commands)
    return parser
