"""Inf that a reduction brings into gradients after a block looked at them is seen before the step, on all ranks.

On two processes over gloo. In the fourth step the gradient of rank 0 overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoamp

pytestmark = pytest.mark.processes

RANKS, STEPS, BAD_STEP = 2, 6, 3
INF = float("inf")


def nothing(model: nn.Module) -> None:
    """Leave gradients as they are."""


def reduced(model: nn.Module) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad)


def reduced_by_messages(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        other = torch.empty_like(param.grad)
        works = [dist.isend(param.grad, 1 - dist.get_rank()), dist.irecv(other, 1 - dist.get_rank())]
        for work in works:
            work.wait()  # type: ignore[union-attr]
        # Past the count of writes.
        param.grad.data.add_(other)


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


# The wrapper, and what the program does between the block and the step.
WAYS: dict[str, tuple[Any, Callable[[nn.Module], None]]] = {
    "DistributedDataParallel": (DistributedDataParallel, nothing),
    "and messages": (DistributedDataParallel, reduced_by_messages),
    "and a write": (DistributedDataParallel, clipped),
    "by hand": (nn.Sequential, reduced),
    "by hand, by messages": (nn.Sequential, reduced_by_messages),
    "fully_shard": (fully_shard, nothing),
    "O2": (DistributedDataParallel, nothing),
    "O2, by hand": (nn.Sequential, reduced),
}


def train(rank: int, name: str) -> list[Any]:
    """Return for each step whether it was skipped and the scale; and the weights at the end."""
    wrapper, between = WAYS[name]
    torch.manual_seed(0)
    scaler = autoamp.DynamicLossScaler(2.0**10)
    net: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    if name.startswith("O2"):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
        net, optimizer = autoamp.initialize(
            net, optimizer, opt_level="O2", loss_scale=scaler, dtype=torch.float16, device_type="cpu", verbosity=0
        )
        handle = autoamp.current_handle()
        model = wrapper(net)
    else:
        handle = autoamp.init(dtype=torch.float16, device_type="cpu", loss_scale=scaler)
        model = wrapper(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    steps: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 1.0 + rank)).float().square().sum()
        loss = loss * (INF if step == BAD_STEP and rank == 0 else 1.0)
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        between(model)
        optimizer.step()
        steps.append((handle.last_step_skipped, handle.loss_scale))
    handle.deactivate()
    return [steps, [getattr(param, "full_tensor", lambda p=param: p)().tolist() for param in model.parameters()]]


def rank_of_all(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    results = {name: train(rank, name) for name in WAYS}
    torch.save(results, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(rank_of_all, (str(folder),), nprocs=RANKS)  # type: ignore[no-untyped-call]
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.mark.parametrize("name", WAYS)
def test_all_ranks_skip_the_same_steps(ranks: list[Any], name: str) -> None:
    (one, weights), (other, others) = (found[name] for found in ranks)
    assert one == other
    assert weights == others
    assert [skipped for skipped, _ in one] == [step == BAD_STEP for step in range(STEPS)]
    assert [scale for _, scale in one] == [2.0**10] * BAD_STEP + [2.0**9] * (STEPS - BAD_STEP)
