"""The processes that torchrun starts: how one of them joins the others, and how it parts from them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


@dataclass(frozen=True)
class Place:
    """Where this process trains: its device, its number, and how many there are."""

    device: torch.device
    rank: int
    size: int


@contextmanager
def process_group() -> Iterator[Place]:
    """Join the processes that torchrun started, on GPUs where there are some; without torchrun there is one."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29513")):
        os.environ.setdefault(name, value)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store, rank, size = next(rendezvous("env://"))
    # Torchrun may keep one store over restarts, in which gloo would find the addresses of processes that are gone.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)  # type: ignore[attr-defined]
    # gloo beside nccl: checkpoints that are saved in the background go through it.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size)
    try:
        yield Place(device, dist.get_rank(), dist.get_world_size())
    except BaseException:
        # Whoever waits for this process is told by that.
        dist.destroy_process_group()
        raise
    leave()


def leave() -> None:
    """Part from the other processes, once all have come so far."""
    # gloo's threads drop the tensors of their last work meanwhile, for which they need Python: under a load, a process
    # that ends at once waits for them, and they for it.
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()
