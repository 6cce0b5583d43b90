"""Prints what a step and a forward pass of large models cost, ours and torch's: the table of docs/performance.md."""

from __future__ import annotations

import argparse
import datetime
import functools
import platform
import warnings

import torch

import autoamp
from tests.null_cuda import device
from tests.null_cuda.device import Cost
from tests.null_cuda.models import LARGE
from tests.null_cuda.training import HALVES, OPTIMIZERS, Case, measured, ours, torch_amp, torch_inference

HEADINGS = ("model", "half", "run", "launches", "library calls", "copies", "waits", "peak MiB")


def main() -> None:
    """Measure and print, a row at a time."""
    parser = argparse.ArgumentParser(prog="python -m tests.null_cuda --table", description=__doc__)
    parser.add_argument("--optimizer", choices=[name for name in OPTIMIZERS if "16" not in name], default="AdamW-fused")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    chosen = parser.parse_args()
    reason = device.obstacle()
    if reason:
        parser.exit(2, f"{reason}\n")
    warnings.simplefilter("ignore")
    print(
        f"{datetime.datetime.now(datetime.UTC).date()}, torch {torch.__version__}, autoamp {autoamp.__version__}, "
        f"Python {platform.python_version()}, {chosen.optimizer}; each cell: torch.autocast / autoamp\n"
    )
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for model in LARGE:
        for half in HALVES if chosen.only in model else ():
            for run, theirs, own in costs(model, half, chosen.optimizer):
                print(f"| {model} | {half} | {run} | {' | '.join(cells(theirs, own))} |", flush=True)


def costs(model: str, half: str, optimizer: str) -> list[tuple[str, Cost, Cost]]:
    """Return for each run what it costs under torch.autocast and with autoamp."""
    dtype = HALVES[half]

    def cost(level: str, name: str) -> Cost:
        return measured(LARGE[model], dtype, functools.partial(ours, Case(model, half, level, name))).cost

    training = measured(LARGE[model], dtype, functools.partial(torch_amp, optimizer)).cost
    inference = measured(LARGE[model], dtype, torch_inference).cost
    return [
        *((f"{level}, training", training, cost(level, optimizer)) for level in ("O1", "O2")),
        ("inference()", inference, cost("inference", "")),
    ]


def cells(theirs: Cost, own: Cost) -> list[str]:
    """Return what a row says: torch's number and ours, of memory in MiB."""
    counts = [(getattr(theirs, name), getattr(own, name)) for name in ("launches", "library", "copies", "waits")]
    return [f"{one} / {other}" for one, other in (*counts, (theirs.peak >> 20, own.peak >> 20))]


if __name__ == "__main__":
    main()
