"""Sets processes up that do not begin with the command: children of its programs, and all under `AUTOAMP=1`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from autoamp.cli import session
from autoamp.cli.output import as_typed, say
from autoamp.errors import AutoampError, UsageError

# `AUTOAMP_LISTS` is read wherever lists are.
_VARIABLES = {name: f"AUTOAMP_{name.upper()}" for name in ("dtype", "device_type", "opt_level", "loss_scale")}


def set_up() -> None:
    """Patch torch as the environment says: `autoamp.pth` calls this once torch is imported.

    An invalid variable ends the process with exit code 2.
    """
    given = {name: value for name, variable in _VARIABLES.items() if (value := os.environ.get(variable))}
    switch = os.environ["AUTOAMP"]
    try:
        if switch != "1":
            raise UsageError(f"expected AUTOAMP=1, or AUTOAMP=0 for no mixed precision, got {switch!r}")
        set_up_child(given)
    except AutoampError as error:
        message = as_typed(error, {name: f"{variable}=" for name, variable in _VARIABLES.items()})
        variables = [f"{_VARIABLES[name]}={value}" for name, value in given.items()]
        say(f"{message}; the environment has {' '.join([f'AUTOAMP={switch}', *variables])}", wrong=True)
        # As the command does. A program that could catch this would go on in another precision.
        raise SystemExit(2) from None


def set_up_child(options: Mapping[str, Any]) -> None:
    """Set up a process that a program under `autoamp run` started, as the program's own was."""
    session.set_up(session.Options(**options))
