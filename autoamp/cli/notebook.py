"""The magic `%autoamp` of notebooks, which `%load_ext autoamp` registers. This file imports no torch."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from autoamp.cli.command import add_casts
from autoamp.cli.output import as_typed
from autoamp.errors import AutoampError, UsageError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise UsageError; argparse would end the kernel."""
        raise UsageError(f"{message}; {' '.join(self.format_usage().split())}")


def load_ipython_extension(shell: Any) -> None:
    """Register the magic `%autoamp`. IPython calls this for `%load_ext autoamp`.

    Args:
        shell: IPython's shell.
    """
    shell.register_magic_function(_autoamp, "line", "autoamp")


def _autoamp(line: str) -> Any:
    """Mixed precision in a notebook: %autoamp on [--dtype fp16], %autoamp off, %autoamp status, %autoamp report."""
    from IPython.core.error import UsageError as MagicError

    try:
        return _run(_parsed(line))
    except AutoampError as error:
        names = {"device_type": "--device-type ", "dtype": "--dtype ", "lists": "--lists "}
        # IPython shows its own class as one line, without a traceback.
        raise MagicError(f"%autoamp: {as_typed(error, names)}") from None


def _parsed(line: str) -> argparse.Namespace:
    # Here, so that the command does not import it.
    import shlex

    parser = _Parser(prog="%autoamp", add_help=False)
    parser.add_argument("action", choices=["on", "off", "status", "report"])
    add_casts(parser, "default: that of the device")
    try:
        return parser.parse_args(shlex.split(line))
    except ValueError as error:
        parser.error(str(error).lower())


def _run(chosen: argparse.Namespace) -> Any:
    """Do what a parsed line asks for. Returns what IPython displays."""
    from autoamp.tools import current_handle, init, report_page

    handle = current_handle()
    if chosen.action == "on":
        # A cell that is run again gets the handle that it made before; init replaces one of other settings.
        made = init(dtype=chosen.dtype, device_type=chosen.device_type, lists=chosen.lists or None, scope="modules")
        made.auto_scale()
        made.record()
    elif chosen.action == "off" and handle is not None:
        handle.deactivate()
    elif chosen.action == "report":
        if handle is None:
            raise UsageError("autoamp is off, and nothing was recorded; run `%autoamp on` before training")
        import html

        from IPython.display import HTML

        page = html.escape(report_page(handle.report()), quote=True)
        return HTML(f'<div><iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe></div>')
    sys.stdout.write(f"{current_handle() or 'autoamp is off'}\n")
    return None
