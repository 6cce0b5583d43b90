"""Patches torch in each Python process with `AUTOAMP=1` in its environment, once torch is imported.

`autoamp.pth` imports this at the start of the process. Nothing happens in a process that does not import torch.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

import wrapt

__all__: list[str] = []

# `AUTOAMP_LISTS` is read wherever lists are.
_OPTIONS = ("dtype", "device_type", "opt_level", "loss_scale")


def _set_up(_: ModuleType) -> None:
    # A program that imports autoamp before torch sets it up itself; so does the command `autoamp`.
    if "autoamp" in sys.modules:
        return
    from autoamp.cli.run import set_up_child

    given = {name: os.environ.get(f"AUTOAMP_{name.upper()}") for name in _OPTIONS}
    set_up_child({name: value for name, value in given.items() if value})


wrapt.register_post_import_hook(_set_up, "torch")
