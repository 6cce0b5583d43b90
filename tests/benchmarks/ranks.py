"""What loss scaling costs where several processes train together, beside torch.autocast and torch.amp.GradScaler.

Each way has processes of its own over gloo, fresh ones now and then, and the ways take turns. Timed are a whole step,
and its part from the end of the backward pass to the end of ``optimizer.step()`` and of ``GradScaler.update()``:
unscaling, the check for inf and nan, what is exchanged for it, and the optimizer itself, which is the same both ways.
Most of it is the optimizer's arithmetic (`torch.optim.adam.adam`): what is left without that is the part of who scales.
Ranks begin that part together, after a barrier, or else it would be the time for which one waits for another.
Gradients are dropped after it. Collectives and calls of Python's functions are counted, and no noise.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import adam

import autoamp
from tests.benchmarks.workers import questions, started

WAYS = ("torch.amp", "autoamp")
WRAPPERS = ("DistributedDataParallel", "fully_shard")
SHORT = {"DistributedDataParallel": "DDP", "fully_shard": "FSDP2"}
RANKS = (1, 2, 4)
DTYPE = torch.float16
SCALE = 2.0**10
WARM, STEPS = 2, 8
"""After so many steps, by which the processor's caches are a training's again, so many more make one value."""

TIMES, COLLECTIVES, CALLS = "times", "collectives", "calls"


PARTS = ("step", "part", "scaling")
"""What is timed: a step, its part after the backward pass, and that part without the optimizer's arithmetic."""


def _nothing() -> None:
    """Do nothing at the end of a part."""


@contextlib.contextmanager
def _arithmetic_timed() -> Iterator[list[float]]:
    """Give a list that has the seconds of each call of Adam's arithmetic, of whatever optimizer of torch's."""
    original, spent = adam.adam, list[float]()

    def timed(*args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        original(*args, **kwargs)
        spent.append(time.perf_counter() - begin)

    adam.adam = timed
    try:
        yield spent
    finally:
        adam.adam = original


@dataclass
class Training:
    """A wrapped model with its inputs and optimizer, and what scales its loss in one way.

    Attributes:
        model: What is called.
        inputs: Of this rank.
        optimizer: Steps all of the model's parameters.
        scaler: Torch's; None where autoamp scales.
        handle: Autoamp's; None where torch scales.
    """

    model: nn.Module
    inputs: Tensor
    optimizer: torch.optim.Optimizer
    scaler: Any
    handle: Any

    @classmethod
    def of(cls, way: str, wrapper: str, width: int = 128) -> Training:
        """Set up a stack of transformer layers of this width, alike on all ranks; a process group must be there."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        model: Any = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        inputs = torch.randn(4, 16, width)
        ours = way == "autoamp"
        handle = (
            autoamp.init(device_type="cpu", dtype=DTYPE, loss_scale=autoamp.DynamicLossScaler(SCALE)) if ours else None
        )
        scaler = None if ours else torch.amp.GradScaler("cpu", init_scale=SCALE)
        if wrapper == "fully_shard":
            for part in (*model.layers, model):
                fully_shard(part)
        else:
            model = DistributedDataParallel(model)
        return cls(model, inputs, torch.optim.AdamW(model.parameters(), lr=1e-4), scaler, handle)

    def step(self, between: Callable[[], object] = _nothing, after: Callable[[], object] = _nothing) -> None:
        """Train once; call ``between`` at the end of the backward pass, and ``after`` before gradients are dropped."""
        if self.handle is not None:
            with self.handle.scale_loss(self._loss(), self.optimizer) as scaled:
                scaled.backward()
                between()
            self.optimizer.step()
        else:
            with torch.autocast("cpu", dtype=DTYPE):
                loss = self._loss()
            self.scaler.scale(loss).backward()
            between()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        after()
        self.optimizer.zero_grad()

    def _loss(self) -> Tensor:
        loss: Tensor = self.model(self.inputs).float().square().mean()
        return loss

    def times(self) -> tuple[float, float, float]:
        """Return the seconds of `PARTS`; means of `STEPS` steps."""
        parts: list[float] = []

        def meet() -> None:
            dist.barrier()
            parts.append(-time.perf_counter())

        def part() -> None:
            parts[-1] += time.perf_counter()

        for _ in range(WARM):
            self.step(meet)
        parts.clear()
        with _arithmetic_timed() as spent:
            begin = time.perf_counter()
            for _ in range(STEPS):
                self.step(meet, part)
            whole = time.perf_counter() - begin
        if len(spent) != STEPS:
            raise RuntimeError(f"{STEPS} steps called torch.optim.adam.adam {len(spent)} times; skipped, or not Adam's")
        return whole / STEPS, sum(parts) / STEPS, (sum(parts) - sum(spent)) / STEPS

    def collectives(self) -> int:
        """Return how many collectives a step has after its backward pass."""
        with CommDebugMode() as comms:
            before: list[int] = []
            self.step(lambda: before.append(comms.get_total_counts()))
        return int(comms.get_total_counts()) - before[0]

    def calls(self) -> int:
        """Return how many functions of Python a step calls after its backward pass, the optimizer's own included."""
        count = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call"

        for _ in range(3):
            # What `collectives` makes of gradients is unusual, and what is usual is learnt anew.
            self.step()
        self.step(lambda: sys.setprofile(note), lambda: sys.setprofile(None))
        # The function that ends it.
        return count - 1


def rank(connection: Connection, way: str, wrapper: str, index: int, size: int, store: str) -> None:
    """Be one rank of a way: answer `TIMES`, `COLLECTIVES` and `CALLS`, on all ranks at once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=size)
    training = Training.of(way, wrapper)
    for _ in range(3):
        training.step()
    answers: dict[str, Callable[[], object]] = {
        TIMES: training.times,
        COLLECTIVES: training.collectives,
        CALLS: training.calls,
    }
    for question in questions(connection):
        connection.send(answers[question]())


class Ranks:
    """The processes of one way.

    Args:
        way: Of `WAYS`.
        wrapper: Of `WRAPPERS`.
        size: How many there are.
        folder: Where they meet.
    """

    def __init__(self, way: str, wrapper: str, size: int, folder: Path) -> None:
        store = str(folder / f"{way} {wrapper} {size} {time.monotonic_ns()}")
        self._connections = [started(rank, way, wrapper, index, size, store) for index in range(size)]

    def ask(self, question: str) -> list[Any]:
        """Ask all of them at once, and return their answers."""
        for connection in self._connections:
            connection.send(question)
        return [connection.recv() for connection in self._connections]

    def times(self) -> tuple[float, ...]:
        """Return the seconds of `PARTS`, of the slowest rank each."""
        return tuple(map(max, zip(*self.ask(TIMES), strict=True)))

    def close(self) -> None:
        """Let the processes end."""
        with contextlib.suppress(OSError):
            for connection in self._connections:
                connection.close()


def measure(rounds: int, processes: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return by wrapper and number of ranks, and then by way, the seconds of each round, and what a step has of each
    other thing that is counted.

    Args:
        rounds: How many times each way is asked with the same processes.
        processes: How many times fresh processes are started: where the memory of a process lies tells too.
        folder: For files by which processes meet.
    """
    found: dict[str, dict[str, Any]] = {}
    for wrapper in WRAPPERS:
        for size in RANKS:
            results: dict[str, Any] = {way: {part: [] for part in PARTS} for way in WAYS}
            for _ in range(processes):
                groups = {way: Ranks(way, wrapper, size, folder) for way in WAYS}
                for number in range(rounds):
                    # Who comes second finds a warmer machine.
                    for way in WAYS if number % 2 else reversed(WAYS):
                        for part, seconds in zip(PARTS, groups[way].times(), strict=True):
                            results[way][part].append(seconds)
                for way, group in groups.items():
                    for question in (COLLECTIVES, CALLS):
                        results[way][question] = max(group.ask(question))
                    group.close()
            found[f"{SHORT[wrapper]}, {size}"] = results
    return found
