"""The processes in which workloads are timed: one for each way, and one for `init()` itself."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

import autoamp
from tests.benchmarks.cases import CASES, DEVICE, TrainingStep, Workload, autocast, in_scope

WAYS = ("plain", "autocast", "autoamp")
STEP = "training step"
NAMES = (*(case.name for case in CASES), STEP)
# One way's share of a round, in seconds: of a call, and of a whole run, which takes longer to find its pace after the
# others had the processor's caches.
SLICE, LONG_SLICE = 0.01, 0.1


def started(target: Any, *arguments: Any) -> Connection:
    """Run a function in a process of its own that ends with this one; return the connection that it was given."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *arguments), daemon=True).start()
    theirs.close()
    return ours


def asked(connection: Connection, question: str) -> Any:
    """Send a question and wait for the answer."""
    connection.send(question)
    return connection.recv()


def questions(connection: Connection) -> Iterator[str]:
    """Yield what is asked until the other end is dropped."""
    with contextlib.suppress(EOFError):
        while True:
            yield connection.recv()


def timing(connection: Connection, way: str, dtype_name: str) -> None:
    """Answer each name of a case with the seconds of one call in one way."""
    torch.set_num_threads(1)
    dtype = getattr(torch, dtype_name)
    handle = None
    if way == "autoamp":
        handle = autoamp.init(device_type=DEVICE, dtype=dtype, loss_scale=128.0)
    workloads: dict[str, tuple[Workload, int, bool]] = {}
    for case in CASES:
        workload = case.make(dtype)
        scoped = way == "autocast" and case.scoped
        workloads[case.name] = (in_scope(workload, dtype) if scoped else workload, case.calls, scoped)
    training = TrainingStep()
    steps = {"plain": training.plain, "autocast": lambda: training.with_autocast(dtype)}
    workloads[STEP] = (training.with_handle(handle) if handle else steps[way](), 1, True)
    counts = dict.fromkeys(NAMES, 1)
    for name in questions(connection):
        workload, calls, scoped = workloads[name]
        with autocast(dtype) if way == "autocast" and not scoped else contextlib.nullcontext():
            connection.send(seconds_of(workload, counts, name) / calls)


def seconds_of(workload: Workload, counts: dict[str, int], name: str, share: float = SLICE) -> float:
    """Return the seconds of one call, from as many as fill a slice; how many is found out the first time.

    They are those of the processor, so that others who want it are not counted.
    """
    workload()
    while True:
        start = time.process_time()
        for _ in range(counts[name]):
            workload()
        seconds = time.process_time() - start
        if seconds >= share / 2:
            return seconds / counts[name]
        counts[name] *= 2


def cycling(connection: Connection, dtype_name: str) -> None:
    """Answer each question with the processor's seconds that ``init()`` and ``deactivate()`` took."""
    dtype = getattr(torch, dtype_name)
    for _ in questions(connection):
        # What importing torch left to the garbage collector is none of init()'s time, and more than all of it.
        gc.collect()
        start = time.process_time()
        handle = autoamp.init(device_type=DEVICE, dtype=dtype)
        between = time.process_time()
        handle.deactivate()
        connection.send((between - start, time.process_time() - between))
