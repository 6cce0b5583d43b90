"""The command `autoamp`: run a program, look at this machine, check lists. This and its options import no torch."""

from __future__ import annotations

from autoamp.cli.command import main, parser
from autoamp.cli.notebook import load_ipython_extension

__all__ = ["load_ipython_extension", "main", "parser"]
