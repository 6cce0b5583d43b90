"""Starts a script once for each GPU: what ``python -m apex.parallel.multiproc script.py arguments`` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from autoamp.errors import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script in one process for each GPU, or in a single one without GPUs, and wait for all of them.

    Each process gets ``--world-size N --rank I`` after the arguments given, and in its environment ``WORLD_SIZE``,
    ``RANK`` and ``LOCAL_RANK``, with ``MASTER_ADDR`` and ``MASTER_PORT`` where they are not set. ``--world-size N``
    among the arguments sets the number of processes.

    Args:
        arguments: The script and its arguments; None for those of the command line.

    Returns:
        The exit status of the process of lowest rank that failed, 0 where none did.

    Raises:
        UsageError: There is no script, or ``--world-size`` is not followed by a whole number from 1 on.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        raise UsageError("no script was given; call it as: python -m apex.parallel.multiproc script.py arguments")
    if not any(argument.partition("=")[0] == "--world-size" for argument in given):
        given += ["--world-size", str(max(1, torch.cuda.device_count()))]
    world = _world_size(given)
    children = [_start(given, rank, world) for rank in range(world)]
    return next((status for status in [child.wait() for child in children] if status), 0)


def _world_size(arguments: Sequence[str]) -> int:
    """Return the number in ``--world-size N`` or ``--world-size=N``. UsageError: it is no whole number from 1 on."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    text = next(iter(words[words.index("--world-size") + 1 :]), "nothing")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--world-size must be a whole number of 1 or more, not {text!r}")
    return int(text)


def _start(arguments: Sequence[str], rank: int, world: int) -> subprocess.Popen[bytes]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return subprocess.Popen([sys.executable, *arguments, "--rank", str(rank)], env={**shared, **os.environ, **own})


if __name__ == "__main__":
    sys.exit(main())
