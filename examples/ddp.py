"""Train a transformer on several processes with torch's DistributedDataParallel; stop it and it goes on.

    torchrun --nproc-per-node 2 examples/ddp.py
    torchrun --nproc-per-node 2 --max-restarts 3 examples/ddp.py --checkpoints run --opt-level O2 --dtype fp16

On GPUs it runs over nccl, elsewhere over gloo. With `--checkpoints` a run goes on from the last checkpoint in that
folder: after a process was killed (`--max-restarts`), with more steps, or on another number of processes. On the same
number the resumed run is bitwise the one that was never stopped. Model, data and loop are in `transformer.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from processes import Place
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformer import Transformer, precision, run

import autoamp


def setup(model: Transformer, options: argparse.Namespace, place: Place) -> tuple[nn.Module, torch.optim.Optimizer]:
    """First initialize(), then the wrapper: its buckets have the dtypes of the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    autoamp.initialize(model, optimizer, **precision(options, place))
    return DistributedDataParallel(model), optimizer


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    return run(setup, "Train a transformer with DistributedDataParallel.", arguments)


if __name__ == "__main__":
    sys.exit(main())
