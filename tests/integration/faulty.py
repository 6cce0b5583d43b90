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

from torch.optim.optimizer import register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    name, rank, step, *arguments = sys.argv[1:]
    steps = 0

    def before_step(optimizer: Any, *_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == int(step) - 1:
            # A parameter in the middle: some gradients of the next pass are reduced by then, others are not.
            params = optimizer.param_groups[0]["params"]
            params[len(params) // 2].register_hook(die)

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == rank:
        register_optimizer_step_pre_hook(before_step)
    return int(importlib.import_module(name).main(arguments))


if __name__ == "__main__":
    sys.exit(main())
