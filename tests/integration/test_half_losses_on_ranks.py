"""Losses of half precision without an inf, on ranks that train together: each looks at what it has, by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.integration.spawned import counted, on_ranks

pytestmark = pytest.mark.processes

WORLD = 2
# Of the norm, whose weights of 1 and biases of 1 swallow updates by the lowest of these rates.
RATES = {"swallowed": 1e-6, "moves": 0.02}
WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "fully_shard": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,))),
}


def train(rank: int, wrapper: str, rate: float, *, looks: bool) -> dict[str, Any]:
    """Train a half model for some steps, of two backward passes each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)).bfloat16()
    nn.init.ones_(model[1].bias)
    wrapped = WRAPPERS[wrapper](model)
    layers = [*model[0].parameters(), *model[2].parameters()]
    groups = [{"params": layers, "lr": 0.01}, {"params": model[1].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=rate, eps=1e-4)
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16, scope="modules")
    recording = handle.record() if looks else None
    with warnings.catch_warnings(record=True) as told, counted() as calls:
        warnings.simplefilter("always")
        for step in range(20):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + rank)).bfloat16()
            optimizer.zero_grad()
            for part in x.chunk(2):
                wrapped(part).float().sum().backward()
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    handle.deactivate()
    weights = [getattr(param, "to_local", param.detach)().detach().clone() for param in model.parameters()]
    rows = [] if recording is None else list(recording.half_losses.rows.values())
    texts = [str(one.message) for one in told if "gradient" in str(one.message)]
    return {"rows": rows, "told": texts, "weights": weights, "calls": calls()}


def found() -> dict[str, Any]:
    rank = dist.get_rank()
    return {
        f"{wrapper}-{name}-{looks}": train(rank, wrapper, rate, looks=looks)
        for wrapper in WRAPPERS
        for name, rate in RATES.items()
        for looks in (False, True)
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found."""
    return on_ranks(tmp_path_factory, WORLD, found)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_rank_tells_of_swallowed_updates_once(wrapper: str, ranks: list[Any]) -> None:
    for one in ranks:
        swallowed, moves = one[f"{wrapper}-swallowed-True"], one[f"{wrapper}-moves-True"]
        assert [(row["kind"], row["group"]) for row in swallowed["rows"]] == [("updates", 1)]
        (text,) = swallowed["told"]
        assert "step 4 of AdamW changed no bit of 100.0% of the elements with a gradient in group 1" in text
        assert moves["rows"] == moves["told"] == []


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nothing_changes_and_no_collective_comes_in(wrapper: str, rate: str, ranks: list[Any]) -> None:
    for one in ranks:
        looked, plain = one[f"{wrapper}-{rate}-True"], one[f"{wrapper}-{rate}-False"]
        assert all(torch.equal(a, b) for a, b in zip(looked["weights"], plain["weights"], strict=True))
        assert looked["calls"] == plain["calls"]
