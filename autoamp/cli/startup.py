"""Patches torch in a process with `AUTOAMP=1` in its environment. `autoamp.pth` calls this once torch is imported."""

from __future__ import annotations

import os

from autoamp.cli.output import say
from autoamp.cli.run import set_up_child
from autoamp.errors import AutoampError, UsageError

# `AUTOAMP_LISTS` is read wherever lists are.
_VARIABLES = {f"AUTOAMP_{name.upper()}": name for name in ("dtype", "device_type", "opt_level", "loss_scale")}


def set_up() -> None:
    """Patch torch as the environment says. An invalid variable ends the process with exit code 2."""
    given = {variable: value for variable in _VARIABLES if (value := os.environ.get(variable))}
    switch = os.environ["AUTOAMP"]
    try:
        if switch != "1":
            raise UsageError(f"expected AUTOAMP=1, or AUTOAMP=0 for no mixed precision, got {switch!r}")
        set_up_child({_VARIABLES[variable]: value for variable, value in given.items()})
    except AutoampError as error:
        variables = " ".join(f"{variable}={value}" for variable, value in {"AUTOAMP": switch, **given}.items())
        say(f"{error}; the environment has {variables}", wrong=True)
        # As the command does. A program that could catch this would go on in another precision.
        raise SystemExit(2) from None
