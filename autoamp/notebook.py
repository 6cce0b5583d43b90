"""The magic `%autoamp` of notebooks, which `%load_ext autoamp` registers."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

import torch

from autoamp.diagnostics import report_page
from autoamp.errors import AutoampError, UsageError
from autoamp.runtime import current_handle, init

__all__ = ["load_ipython_extension"]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise UsageError; argparse would end the kernel."""
        raise UsageError(f"%autoamp: {message}; {self.format_usage().strip()}")


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
        return _run_line(line)
    except AutoampError as error:
        # IPython shows its own class as one line, without a traceback.
        raise MagicError(str(error)) from None


def _run_line(line: str) -> Any:
    # Here, so that `import autoamp` takes no longer.
    import shlex

    parser = _Parser(prog="%autoamp", add_help=False)
    parser.add_argument("action", choices=["on", "off", "status", "report"])
    parser.add_argument("--dtype", choices=_DTYPES)
    parser.add_argument("--device-type")
    parser.add_argument("--lists", action="append")
    chosen = parser.parse_args(shlex.split(line))
    if chosen.action == "on":
        # A cell that is run again gets the handle that it made before; init replaces one of other settings.
        handle = init(
            dtype=_DTYPES.get(chosen.dtype), device_type=chosen.device_type, lists=chosen.lists, scope="modules"
        )
        handle.auto_scale()
        handle.record()
    elif chosen.action == "off" and (active := current_handle()) is not None:
        active.deactivate()
    elif chosen.action == "report":
        return _shown_report()
    sys.stdout.write(f"{current_handle() or 'autoamp is off'}\n")
    return None


def _shown_report() -> Any:
    handle = current_handle()
    if handle is None:
        raise UsageError("%autoamp report: autoamp is off, and nothing was recorded; run `%autoamp on` before training")
    import html

    from IPython.display import HTML

    page = html.escape(report_page(handle.report()), quote=True)
    return HTML(f'<div><iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe></div>')
