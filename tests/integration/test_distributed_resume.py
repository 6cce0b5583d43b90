"""Checkpoints of four ranks: bitwise on the same number, loaded on more and on fewer; and a rank that hangs.

Over gloo, on spawned processes that serve all cases.
"""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.integration.spawned import run_ranks
from tests.states import differences, flat

pytestmark = pytest.mark.processes

SAVED, END, HANGS = 5, 9, 5
CASES = [(wrapper, level) for wrapper in ("ddp", "fsdp2", "tp", "alone") for level in ("O1", "O2")]


class Training:
    """A training in fp16 whose first loss scales overflow; the batch of a step is the same on any number of ranks."""

    def __init__(self, wrapper: str, level: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        autoamp.initialize(
            model, opt_level=level, dtype=torch.float16, device_type="cpu", verbosity=0,
            loss_scale=autoamp.DynamicLossScaler(2.0**21, growth_interval=3),
        )  # fmt: skip
        if wrapper == "fsdp2":
            fully_shard(model)
        elif wrapper == "tp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        elif wrapper == "ddp" and dist.get_world_size() > 1:
            # Its buckets stay as they are at first, and with them the order of sums.
            model = DistributedDataParallel(model, find_unused_parameters=True)
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), 1e-2)
        self.step = 0
        # Without a wrapper each rank does all of the work.
        self._shares = wrapper in ("ddp", "fsdp2")

    def train(self, until: int) -> None:
        while self.step < until:
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(self.step))
            x = x.chunk(dist.get_world_size())[dist.get_rank()] if self._shares else x
            self.optimizer.zero_grad()
            with autoamp.scale_loss(self.model(x).float().square().mean(), self.optimizer) as scaled:
                scaled.backward()
            self.optimizer.step()
            self.step += 1

    def state(self) -> dict[str, Any]:
        return {"training": autoamp.DistributedState(self.model, self.optimizer), "step": self.step}

    def load(self, path: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        self.step = state["step"]

    def whole(self) -> dict[str, Any]:
        """Return all that a checkpoint would hold, in whole tensors; by all ranks."""
        return flat(self.state()["training"].state_dict())


def write(case: tuple[str, str], path: str, group: Any) -> dict[str, Any]:
    """Train without a stop, saved on the way while training goes on, whose collectives are of another group."""
    training = Training(*case)
    training.train(SAVED)
    at = training.whole()
    saving = dcp.async_save(training.state(), checkpoint_id=path, process_group=group)
    training.train(END)
    saving.result()  # type: ignore[union-attr]
    return {"at": at, "end": training.whole()}


def read(case: tuple[str, str], path: str) -> dict[str, Any]:
    training = Training(*case, seed=1)
    training.load(path)
    at = training.whole()
    training.train(END)
    return {"at": at, "end": training.whole()}


def hang() -> tuple[str, float]:
    """Let the last rank miss the third step; the others are told by torch."""
    training = Training("fsdp2", "O1")
    training.train(2)
    began = time.monotonic()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(2 * HANGS)
        return "hung", 0.0
    try:
        training.train(3)
    except autoamp.AutoampError as error:
        return f"ours: {error}", 0.0
    except RuntimeError as error:
        return f"torch's: {error}", time.monotonic() - began
    return "nothing", 0.0


def work(index: int, world: int, folder: str, reads: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=index, world_size=world)
    found: dict[Any, Any] = {}
    group = dist.new_group(backend="gloo")
    for case in CASES:
        if world > 1:
            found[(*case, "written")] = write(case, f"{folder}/{world}-{'-'.join(case)}", group)
        for name in reads:
            found[(*case, name)] = read(case, f"{folder}/{name}-{'-'.join(case)}")
    if (handle := autoamp.current_handle()) is not None:
        handle.deactivate()
    dist.destroy_process_group()
    if world == 4:
        timeout = datetime.timedelta(seconds=HANGS)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/hang", rank=index, world_size=world, timeout=timeout
        )
        found["hang"] = hang()
    torch.save(found, f"{folder}/{world}-{index}.pt")
    # torch 2.13 aborts now and then as a process with a DDP reducer ends, with or without autoamp.
    os._exit(0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Any, Any]]]:
    """What each rank of each number of ranks found."""
    folder = tmp_path_factory.mktemp("resume")
    for world, reads in ((2, ["2"]), (4, ["4", "2"]), (1, ["4"])):
        run_ranks(work, (world, str(folder), reads), world)
    return {world: [torch.load(folder / f"{world}-{index}.pt") for index in range(world)] for world in (1, 2, 4)}


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("world", [2, 4])
def test_on_the_same_number_of_ranks_the_resumed_run_is_bitwise_the_whole_one(
    found: Any, case: tuple[str, str], world: int
) -> None:
    for rank in found[world]:
        written, resumed = rank[(*case, "written")], rank[(*case, str(world))]
        # What was saved is what was there then, though training went on meanwhile.
        assert differences(written["at"], resumed["at"]) == []
        assert differences(written["end"], resumed["end"]) == []
        assert differences(written["at"], written["end"]) != []
        assert 0 < written["at"][".amp.skipped_steps"] < SAVED
        weight = written["at"][".model.0.weight"]
        assert weight.dtype is torch.float32
        # Steps were taken by then, whose sums half precision has no room for.
        assert not torch.equal(weight, weight.half().float())


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 1)])
def test_on_other_numbers_of_ranks_it_goes_on_from_the_same_bits(
    found: Any, case: tuple[str, str], saved: int, loaded: int
) -> None:
    written = found[saved][0][(*case, "written")]
    for rank in found[loaded]:
        resumed = rank[(*case, str(saved))]
        assert differences(written["at"], resumed["at"]) == []
        # Sums of gradients are in another order, and Adam makes a step of what rounding leaves of a gradient near 0:
        # single weights differ, and the way that all of them went does not.
        assert distance(resumed["end"], written["end"]) < 0.1 * distance(written["at"], written["end"])
        assert resumed["end"][".amp.loss_scaler0.loss_scale"] == written["end"][".amp.loss_scaler0.loss_scale"]


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the 2-norm of the difference of the weights."""
    names = [name for name in one if name.startswith(".model.")]
    return float(torch.cat([(one[name] - other[name]).flatten() for name in names]).norm())


def test_a_rank_that_hangs_ends_in_the_timeout_of_torch(found: Any) -> None:
    *others, last = (rank["hang"] for rank in found[4])
    assert last[0] == "hung"
    for message, seconds in others:
        assert message.startswith("torch's: "), message
        assert seconds < 2 * HANGS
