"""Master weights in processes that train together: equal on all ranks, and sums of gradients in fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autoamp
from autoamp import parallel
from autoamp.fp16_utils import FP16_Optimizer
from tests.integration.spawned import on_ranks

pytestmark = pytest.mark.processes

WORLD, HALF = 2, torch.float16


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def part_of(rank: int, step: int, size: int = 6) -> Tensor:
    return torch.randn(WORLD * size, 8, generator=torch.Generator().manual_seed(step)).chunk(WORLD)[rank]


def o2(model: nn.Module, optimizer: Any, scale: float = 64.0) -> autoamp.Handle:
    autoamp.initialize(model, optimizer, opt_level="O2", dtype=HALF, device_type="cpu", loss_scale=scale, verbosity=0)
    handle = autoamp.current_handle()
    assert isinstance(handle, autoamp.Handle)
    return handle


def masters(optimizer: Any) -> list[Tensor]:
    return [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]


# -- what each rank does --


def reduce_by_hand(model: nn.Module) -> nn.Module:
    """Broadcast through ``.data`` at the start, as programs without a wrapper do."""
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch": DistributedDataParallel,
    "views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "apex": parallel.DistributedDataParallel,
    "reducer": lambda model: vars(model).update(reducer=parallel.Reducer(model)) or model,
    "by hand": reduce_by_hand,
}
SUMMED = ("torch", "views", "apex", "by hand")


def train(rank: int, name: str) -> dict[str, Any]:
    """Train from weights of this rank's own, which the wrapper makes those that rank 0 has loaded."""
    model = network(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    handle = o2(model, optimizer)
    if rank == 0:
        model.load_state_dict(network(99).state_dict())
    wrapped = WRAPPERS[name](model)
    started = None
    for step in range(6):
        optimizer.zero_grad()
        with autoamp.scale_loss(wrapped(part_of(rank, step)).square().mean(), optimizer) as scaled:
            started = masters(optimizer) if started is None else started
            scaled.backward()
        for param in model.parameters() if name in ("reducer", "by hand") else ():
            dist.all_reduce(param.grad)
            param.grad /= WORLD
        optimizer.step()
    found = {"started": started, "masters": masters(optimizer), "halves": [p.detach() for p in model.parameters()]}
    found = {key: [tensor.clone() for tensor in value] for key, value in found.items()}  # type: ignore[union-attr]
    handle.deactivate()
    return found


def fp16_optimizer(rank: int, first: str) -> list[Tensor]:
    """Train by `FP16_Optimizer`, made before or after the wrapper."""
    model = network(rank).half()
    wrapped = DistributedDataParallel(model) if first == "wrapper" else None
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), static_loss_scale=64.0)
    wrapped = wrapped or DistributedDataParallel(model)
    for step in range(4):
        optimizer.zero_grad()
        for half in part_of(rank, step).half().chunk(2):
            optimizer.backward(wrapped(half).float().square().mean() / 2)
        optimizer.step()
    return masters(optimizer)


def accumulate(rank: int, name: str, scale: float, count: int, no_sync: bool = False) -> dict[str, Any]:
    """Add the gradients of many blocks, against the exact sum of what each block alone gives."""
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = o2(model, optimizer, scale)
    wrapped = WRAPPERS[name](model)

    def gradients(steps: range, silent: bool = False) -> list[Tensor]:
        optimizer.zero_grad()
        for step in steps:
            quiet = silent or (no_sync and step + 1 < count)
            with wrapped.no_sync() if quiet else contextlib.nullcontext():
                loss = wrapped(part_of(rank, step)).float().square().mean()
                with autoamp.scale_loss(loss * 3.0, optimizer) as scaled:
                    scaled.backward()
        return [param.grad.clone() for param in autoamp.master_params(optimizer)]

    together = gradients(range(count))
    parts = [[grad.double() for grad in gradients(range(step, step + 1), silent=no_sync)] for step in range(count)]
    for part in parts:
        for grad in part if no_sync else ():
            dist.all_reduce(grad)
            grad.div_(WORLD)
    exact = [torch.stack(grads).sum(0) for grads in zip(*parts, strict=True)]
    largest = max(float(grad.abs().max()) for grad in exact)
    handle.deactivate()
    error = max(float((a - b).abs().max()) for a, b in zip(together, exact, strict=True)) / largest
    return {"error": error, "grads": together}


def lopsided(rank: int) -> list[float]:
    """Reduce by Apex's wrapper where one rank alone has an earlier gradient, in fp32 beside the master."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"both": nn.Linear(8, 1), "first": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = o2(model, optimizer, 8.0)
    wrapped = parallel.DistributedDataParallel(model)

    def back(*names: str) -> None:
        given = torch.ones(1, 8, dtype=torch.float16)
        loss = torch.stack([model[name](given).float().sum() for name in names]).sum()
        with autoamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    wrapped.disable_allreduce()
    back(*(("both", "first") if rank == 0 else ("both",)))
    wrapped.enable_allreduce()
    back("both")
    found = [float(param.grad.max()) for param in autoamp.master_params(optimizer)]
    handle.deactivate()
    return found


def found_by_rank() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {"lopsided": lopsided(rank)}
    for name in WRAPPERS:
        found[name] = train(rank, name)
    for name in SUMMED:
        found[f"sum {name}"] = accumulate(rank, name, 65536.0, 4)
    found["no_sync"] = accumulate(rank, "torch", 64.0, 8, no_sync=True)
    for first in ("wrapper", "optimizer"):
        found[f"fp16_optimizer {first}"] = fp16_optimizer(rank, first)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two processes found."""
    return on_ranks(tmp_path_factory, WORLD, found_by_rank)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", WRAPPERS)
def test_masters_are_equal_on_all_ranks(ranks: list[Any], name: str) -> None:
    one, other = (found[name] for found in ranks)
    assert same(one["masters"], other["masters"])
    assert same(one["halves"], other["halves"])
    assert not same(one["masters"], one["started"])
    loaded = [param.detach() for param in network(99).parameters()]
    if name != "by hand":
        # Unrounded: a run that is resumed before it is wrapped is bitwise the run that went on.
        assert same(one["started"], loaded)
        assert same(other["started"], loaded)


@pytest.mark.parametrize("first", ["wrapper", "optimizer"])
def test_fp16_optimizer_is_equal_on_all_ranks(ranks: list[Any], first: str) -> None:
    one, other = (found[f"fp16_optimizer {first}"] for found in ranks)
    assert same(one, other)


@pytest.mark.parametrize("name", SUMMED)
def test_gradients_add_up_in_fp32(ranks: list[Any], name: str) -> None:
    # Apex's wrapper averages the sums, where the parts that they are compared with were averaged in half precision.
    bound = 2e-4 if name == "apex" else 1e-6
    for found in ranks:
        assert found[f"sum {name}"]["error"] < bound


def test_what_no_sync_left_is_reduced(ranks: list[Any]) -> None:
    one, other = (found["no_sync"] for found in ranks)
    assert same(one["grads"], other["grads"])
    assert one["error"] < 2e-3


def test_an_earlier_gradient_of_one_rank_alone(ranks: list[Any]) -> None:
    for found in ranks:
        # Each block gives 1: two of them on each rank, and one on one rank of two.
        assert found["lopsided"] == [2.0, 2.0, 0.5, 0.5]
