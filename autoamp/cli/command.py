"""The command `autoamp`, once its command line is parsed."""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Sequence

from autoamp.cli.output import say
from autoamp.errors import AutoampError

__all__ = ["run_command"]

# Each function returns the exit code, or a function that runs the program. A command imports only its own module.
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


def run_command(chosen: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run a parsed command line and return the exit code. An exception of a program propagates.

    Args:
        chosen: The parsed command line.
        argv: The command line, without the name of the command ``autoamp``.
    """
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
