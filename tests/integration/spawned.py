"""Runs a function on several processes, which form a process group over gloo, and examples by torchrun."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

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


def _told(rank: int, function: Callable[..., None], args: tuple[Any, ...], folder: str) -> None:
    """Call ``function(rank, *args)``; a process that dies of a signal leaves its stacks, Python's and C++'s."""
    # What the other process left as garbage may have threads, which a fork lacks: nobody may free it here.
    gc.freeze()
    with open(f"{folder}/stacks{rank}", "w") as stacks:
        os.dup2(stacks.fileno(), 2)
    faulthandler.enable(file=2)
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    function(rank, *args)


def run_ranks(function: Callable[..., None], args: tuple[Any, ...], world: int) -> None:
    """Call ``function(rank, *args)`` in ``world`` processes, and wait for them.

    They are forks where that is possible: otherwise each of them imports torch, which takes seconds. Not with a GPU:
    autograd has threads for it, which a fork lacks.

    Raises:
        ProcessException: The function raised in one of them, or one ended otherwise. The notes have what all wrote to
            stderr, with the stacks of those that died of a signal.
    """
    forks = hasattr(os, "fork") and not torch.accelerator.is_available()
    method = "fork" if forks else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.start_processes(_told, (function, args, folder), world, start_method=method)
        except ProcessException as error:
            for told in sorted(pathlib.Path(folder).glob("stacks*")):
                error.add_note(told.read_text(errors="replace")[-20_000:])
            raise


def on_ranks(
    folders: pytest.TempPathFactory, world: int, found_by: Callable[[], Any], timeout: float = 300.0
) -> list[Any]:
    """Return what ``found_by``, a function of a module, returns on each of ``world`` ranks.

    In CI a process of a group over gloo once died of SIGABRT, for a reason that is not known. So ranks begin anew after
    a first death by a signal, and a warning has the stacks; a second death is an error.
    """

    def attempt() -> list[Any]:
        folder = folders.mktemp("ranks")
        run_ranks(_rank, (world, str(folder), found_by, timeout), world)
        return [torch.load(folder / f"{index}.pt", weights_only=False) for index in range(world)]

    try:
        return attempt()
    except ProcessException as error:
        # Another rank may be the first to end, as its connection was closed.
        if not any("Fatal Python error" in note for note in error.__notes__):
            raise
        warnings.warn("\n".join([f"Ranks begin anew: {error}", *error.__notes__]), stacklevel=2)
        return attempt()


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
