"""Runs a function on several processes, which form a process group over gloo, and examples by torchrun."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.launches import ROOT, environment


def _rank(index: int, world: int, folder: str, found_by: Callable[[], Any], timeout: float) -> None:
    torch.set_num_threads(1)
    logging.getLogger("autoamp").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=index, world_size=world,
        timeout=datetime.timedelta(seconds=timeout),
    )  # fmt: skip
    torch.save(found_by(), f"{folder}/{index}.pt")
    dist.barrier()
    # torch 2.13 now and then aborts as a process with a DDP reducer ends, with or without autoamp.
    os._exit(0)


def run_ranks(function: Callable[..., None], args: tuple[Any, ...], world: int) -> None:
    """Call ``function(rank, *args)`` in ``world`` processes, and wait for them.

    They are forks where that is possible: otherwise each of them imports torch, which takes seconds. Not with a GPU:
    autograd has threads for it, which a fork lacks.
    """
    forks = hasattr(os, "fork") and not torch.accelerator.is_available()
    torch.multiprocessing.start_processes(function, args, world, start_method="fork" if forks else "spawn")


def on_ranks(
    folders: pytest.TempPathFactory, world: int, found_by: Callable[[], Any], timeout: float = 300.0
) -> list[Any]:
    """Return what ``found_by``, a function of a module, returns on each of ``world`` ranks."""
    folder = folders.mktemp("ranks")
    run_ranks(_rank, (world, str(folder), found_by, timeout), world)
    return [torch.load(folder / f"{index}.pt", weights_only=False) for index in range(world)]


def torchrun(processes: int, *command: str, restarts: int = 0) -> str:
    """Run an example by torchrun, expect the exit code 0, and return what it printed."""
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
            "--max-restarts", str(restarts), *command,
        ],
        env={**environment(), "COLUMNS": "120"}, cwd=ROOT / "examples", stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count the calls of `torch.distributed.all_reduce`, which costs less than to look at every operator."""
    calls, original = 0, dist.all_reduce

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    dist.all_reduce = count
    try:
        yield lambda: calls
    finally:
        dist.all_reduce = original
