"""Runs an example of several processes with a fault: ``faulty.py EXAMPLE RANK STEP [arguments]``.

In the first attempt of torchrun that rank kills itself in the middle of the backward pass of that step.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    name, rank, step, *arguments = sys.argv[1:]
    calls = 0

    def before_call(module: Any, args: Any) -> None:
        nonlocal calls
        calls += type(module).__name__.endswith("Transformer")
        if type(module).__name__.endswith("Block") and calls == int(step):
            # In the middle of the backward pass: some gradients are reduced by then, others are not.
            args[0].register_hook(die)

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == rank:
        register_module_forward_pre_hook(before_call)
    return int(importlib.import_module(name).main(arguments))


if __name__ == "__main__":
    sys.exit(main())
