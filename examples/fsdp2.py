"""Train a transformer whose parameters are sharded over processes by torch's `fully_shard`; stop it and it goes on.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 2 --max-restarts 3 examples/fsdp2.py --checkpoints run --dtype fp16

On GPUs it runs over nccl, elsewhere over gloo. With `--checkpoints` a run goes on from the last checkpoint in that
folder: after a process was killed (`--max-restarts`), with more steps, or on another number of processes. On the same
number the resumed run is bitwise the one that was never stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformer import HALF_DTYPES, Transformer, parse, process_group, report, train

import autoamp


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    options = parse(arguments, str(__doc__).splitlines()[0])
    torch.set_num_threads(1)
    with process_group() as place:
        torch.manual_seed(0)
        model = Transformer(options.width, options.depth, heads=4, length=options.length).to(place.device)
        mesh = init_device_mesh(place.device.type, (place.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # The optimizer steps the shards, so it is made after them.
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        autoamp.initialize(
            model,
            optimizer,
            opt_level=options.opt_level,
            dtype=HALF_DTYPES.get(options.dtype),
            device_type=place.device.type,
            verbosity=0,
        )
        state = autoamp.DistributedState(model, optimizer)
        loss = train(options, place, model, optimizer, state)
        report(options, place, "fully_shard", loss)
    return 0


if __name__ == "__main__":
    sys.exit(main())
