"""accelerate and Lightning Fabric beside autoamp on two ranks: what docs/distributed.md says of them."""

from __future__ import annotations

import functools
import logging
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoamp
from tests.integration.spawned import run_ranks

pytestmark = pytest.mark.processes

RANKS, BAD_RANK, BAD_STEP, STEPS = 2, 1, 1, 4
SCALE = 2.0**10
INF = float("inf")
PARTS = 2
# Levels; whose optimizer `scale_loss` gets, or that nobody calls it, which is for fp32 models; in how many passes.
CASES = [
    ("O1", "own", 1), ("O1", "wrapper", PARTS), ("O1", "auto_scale", 1), ("O1", "auto_scale", PARTS),
    ("O2", "own", PARTS), ("O2", "wrapper", 1),
]  # fmt: skip


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sample(step: int) -> Tensor:
    x = torch.randn(RANKS * 4, 8, generator=torch.Generator().manual_seed(step))
    return x.chunk(RANKS)[dist.get_rank()] if dist.is_initialized() else x


class Program:
    """One program in plain torch; what differs with either library is in the subclasses.

    Args:
        level: The opt level.
        way: ``"own"``, ``"wrapper"`` or ``"auto_scale"``.
        parts: In how many passes the gradients of a step add up.
    """

    def __init__(self, level: str, way: str, parts: int = 1) -> None:
        self.level, self.way, self.parts = level, way, parts
        model, self.done = network(), 0
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        autoamp.initialize(
            model, self.optimizer, opt_level=level, dtype=torch.float16, device_type="cpu", verbosity=0,
            loss_scale=autoamp.DynamicLossScaler(SCALE),
        )  # fmt: skip
        self.handle: Any = autoamp.current_handle()
        if way == "auto_scale":
            self.handle.auto_scale()
        self.set_up(model)

    def set_up(self, model: nn.Module) -> None:
        """Wrap model and optimizer: as ``self.model`` and ``self.prepared``."""
        self.model, self.prepared = model, self.optimizer

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def pass_of(self, last: bool, run: Callable[[], None]) -> None:
        """Run one of several passes."""
        run()

    def step(self) -> None:
        self.prepared.step()
        self.prepared.zero_grad()

    def train(self, until: int) -> list[Any]:
        told = []
        for step in range(self.done, until):
            bad = step == BAD_STEP and (not dist.is_initialized() or dist.get_rank() == BAD_RANK)

            def one(part: int, step: int = step, bad: bool = bad) -> None:
                x = sample(step).chunk(self.parts)[part]
                loss = self.model(x).float().square().mean() * (INF if bad and part == 0 else 1.0)
                if self.way == "auto_scale":
                    self.backward(loss)
                else:
                    chosen = self.optimizer if self.way == "own" else self.prepared
                    with autoamp.scale_loss(loss, chosen) as scaled:
                        self.backward(scaled)
                if part + 1 == self.parts:
                    told.append(float(self.handle.clip_grad_norm_(self.optimizer, 0.5)))
                self.step()

            for part in range(self.parts):
                self.pass_of(part + 1 == self.parts, lambda part=part: one(part))  # type: ignore[misc]
        self.done = until
        return told

    def values(self) -> list[Tensor]:
        return [param.detach().clone() for param in autoamp.master_params(self.optimizer)]

    def run(self) -> dict[str, Any]:
        try:
            before = self.train(BAD_STEP), self.values()
            self.train(BAD_STEP + 1)
            same = all(map(torch.equal, before[1], self.values()))
            norms = self.train(STEPS)
            return {
                "same": same, "norms": [*before[0], *norms], "values": self.values(),
                "told": (self.handle.skipped_steps, self.handle.loss_scale), **self.more(),
            }  # fmt: skip
        finally:
            self.handle.deactivate()

    def resumed(self) -> dict[str, Any]:
        """Save, train on, and load by the library; tell whether all is as it was saved."""
        path = Path(os.environ["FOLDER"]) / f"{type(self).__name__}-{self.level}-{self.way}-{self.parts}"
        self.save(path)
        saved = self.handle.loss_scale, self.values()
        self.train(STEPS + 1)
        self.handle.load_state_dict({**self.handle.state_dict(), "loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
        self.load(path)
        return {"resumed": saved[0] == self.handle.loss_scale and all(map(torch.equal, saved[1], self.values()))}

    def save(self, path: Path) -> None:
        """Save by the library."""

    def load(self, path: Path) -> None:
        """Load by the library."""

    def more(self) -> dict[str, Any]:
        return {}


class WithAccelerate(Program):
    def set_up(self, model: nn.Module) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(mixed_precision="no", cpu=True, gradient_accumulation_steps=self.parts)
        self.accelerator.register_for_checkpointing(self.handle)
        self.model, self.prepared = self.accelerator.prepare(model, self.optimizer)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def pass_of(self, last: bool, run: Callable[[], None]) -> None:
        with self.accelerator.accumulate(self.model):
            run()

    def save(self, path: Path) -> None:
        self.accelerator.save_state(str(path))
        dist.barrier()

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))

    def more(self) -> dict[str, Any]:
        return {**self.resumed(), "wrapped": type(self.model).__name__, "own skips": self.prepared.step_was_skipped}


class WithFabric(Program):
    def set_up(self, model: nn.Module) -> None:
        from lightning_fabric import Fabric

        self.fabric = Fabric(accelerator="cpu", devices=RANKS, precision="32-true", strategy="ddp")
        self.fabric.launch()
        self.model, self.prepared = self.fabric.setup(model, self.optimizer)

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def pass_of(self, last: bool, run: Callable[[], None]) -> None:
        self.last = last
        with self.fabric.no_backward_sync(self.model, enabled=not last):
            run()

    def step(self) -> None:
        if self.last:
            super().step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.prepared, "amp": self.handle.state_dict()}

    def save(self, path: Path) -> None:
        self.fabric.save(path, self.state())

    def load(self, path: Path) -> None:
        state = self.state()
        self.fabric.load(path, state)
        self.handle.load_state_dict(state["amp"])

    def more(self) -> dict[str, Any]:
        return {**self.resumed(), "wrapped": type(self.model._forward_module).__name__}


LIBRARIES: dict[str, type[Program]] = {"accelerate": WithAccelerate, "lightning_fabric": WithFabric}


def rank(index: int, folder: str, library: str, port: int) -> None:
    os.environ.update(
        RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), NODE_RANK="0",
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), FOLDER=folder, ACCELERATE_USE_CPU="true",
        TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("autoamp").setLevel(logging.ERROR)
    found = {case: LIBRARIES[library](*case).run() for case in CASES}
    torch.save(found, f"{folder}/{index}.pt")
    dist.barrier()
    # Nobody ends a process group that another rank may still use.
    os._exit(0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Return a function that gives what each rank found with a library, and runs it the first time."""

    @functools.cache
    def run(library: str) -> list[Any]:
        folder = tmp_path_factory.mktemp(library)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        run_ranks(rank, (str(folder), library, port), RANKS)
        return [torch.load(folder / f"{index}.pt", weights_only=False) for index in range(RANKS)]

    return run


def check(runs: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for run in runs:
        assert run["wrapped"] == "DistributedDataParallel"
        assert run["same"], "a rank stepped though gradients overflowed"
        assert run["told"] == alone["told"] == (1, SCALE / 2)
        assert run["resumed"]
        assert run["norms"] == pytest.approx(alone["norms"], rel=4e-3)
        for value, expected in zip(run["values"], alone["values"], strict=True):
            assert float((value - expected).abs().max()) < 4e-3 * float(expected.abs().max())
    assert all(map(torch.equal, runs[0]["values"], runs[1]["values"]))


@pytest.mark.client("accelerate")
@pytest.mark.parametrize(("level", "way", "parts"), CASES)
def test_accelerate(found: Any, level: str, way: str, parts: int) -> None:
    runs = [rank[level, way, parts] for rank in found("accelerate")]
    check(runs, Program(level, way).run())
    # It knows of the skips of its own scaler alone.
    assert not any(run["own skips"] for run in runs)


@pytest.mark.client("lightning_fabric")
@pytest.mark.parametrize(("level", "way", "parts"), CASES)
def test_fabric(found: Any, level: str, way: str, parts: int) -> None:
    runs = [rank[level, way, parts] for rank in found("lightning_fabric")]
    if parts == 1:
        check(runs, Program(level, way).run())
    else:
        # It does not divide by the number of passes.
        assert [run["told"] for run in runs] == [(1, SCALE / 2)] * RANKS
        assert all(run["same"] and run["resumed"] for run in runs)
        assert all(map(torch.equal, runs[0]["values"], runs[1]["values"]))
