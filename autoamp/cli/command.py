"""The command `autoamp`, once its command line is parsed."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from autoamp.cli.output import say
from autoamp.errors import AutoampError

__all__ = ["run_command"]

# Where the function of each command is that ends by itself.
_ACTS = {
    "bisect": ("autoamp.cli.bisect", "bisect"),
    "doctor": ("autoamp.cli.doctor", "doctor"),
    "lists": ("autoamp.cli.lists", "lists"),
    "replay": ("autoamp.cli.replay", "replay"),
    "report": ("autoamp.cli.reports", "report"),
    "tune": ("autoamp.cli.tune", "tune"),
}
# And of each that runs a program.
_PREPARED = {
    "run": ("autoamp.cli.run", "prepared_run"),
    "profile": ("autoamp.cli.profile", "prepared_profile"),
}


def run_command(chosen: argparse.Namespace, argv: Sequence[str]) -> int:
    """Do what a command line says. Returns the exit code; what a program raises goes on.

    Args:
        chosen: What it was parsed to.
        argv: The command line, without the name of the command ``autoamp``.
    """
    if "args" in chosen:
        options = len(argv) - len(chosen.args) - 1
        if argv[options] == "--":
            # argparse drops a "--" that follows the program and is meant for it.
            chosen.args, options = ["--", *chosen.args], options - 1
        chosen.options = argv[1:options]
    try:
        if chosen.command in _ACTS:
            return int(_function(*_ACTS[chosen.command])(chosen))
        program = _function(*_PREPARED[chosen.command])(chosen)
    except AutoampError as error:
        say(str(error), wrong=True)
        return 2
    program()
    return 0


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
