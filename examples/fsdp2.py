"""Train a transformer whose parameters are sharded over processes by torch's `fully_shard`; stop it and it goes on.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 2 --max-restarts 3 examples/fsdp2.py --checkpoints run --opt-level O2 --dtype fp16

On GPUs it runs over nccl, elsewhere over gloo; checkpoints and what follows a fault are as in `ddp.py`, and either goes
on from the other's. Model, data and loop are in `transformer.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from processes import Place
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformer import Transformer, precision, run

import autoamp


def setup(model: Transformer, options: argparse.Namespace, place: Place) -> tuple[nn.Module, torch.optim.Optimizer]:
    """First initialize(), which may cast the parameters, then the shards, then the optimizer that steps them."""
    autoamp.initialize(model, **precision(options, place))
    mesh = init_device_mesh(place.device.type, (place.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=options.lr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    return run(setup, "Train a transformer that fully_shard shards.", arguments)


if __name__ == "__main__":
    sys.exit(main())
