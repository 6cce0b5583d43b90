"""The command `autoamp`: run a program, look at this machine, check lists."""

from __future__ import annotations

from autoamp.cli.command import run_command

__all__ = ["run_command"]
