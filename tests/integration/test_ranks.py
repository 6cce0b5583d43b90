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

WORLD = 2
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def part_of(rank: int, step: int, size: int = 6) -> Tensor:
    return torch.randn(WORLD * size, 8, generator=torch.Generator().manual_seed(step)).chunk(WORLD)[rank]


def o2(model: nn.Module, optimizer: Any, dtype: torch.dtype, scale: float = 64.0) -> autoamp.Handle:
    autoamp.initialize(model, optimizer, opt_level="O2", dtype=dtype, device_type="cpu", loss_scale=scale, verbosity=0)
    handle = autoamp.current_handle()
    assert isinstance(handle, autoamp.Handle)
    return handle


def masters(optimizer: Any) -> list[Tensor]:
    return [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]


# -- what each rank does --


def reduce_by_hand(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Broadcast through ``.data`` at the start, as programs without a wrapper do."""
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    return model


def reducer_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    model.reducer = parallel.Reducer(model)  # type: ignore[assignment]
    return model


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch": DistributedDataParallel,
    "views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "apex": parallel.DistributedDataParallel,
    "reducer": reducer_of,
    "by hand": reduce_by_hand,
}


def average_by_hand(model: nn.Module, name: str) -> None:
    if name in ("reducer", "by hand"):
        for param in model.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= WORLD


def train(rank: int, name: str, dtype: torch.dtype, load: bool = False) -> dict[str, Any]:
    """Train from weights of this rank's own, which the wrapper makes those of rank 0."""
    model = network(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    handle = o2(model, optimizer, dtype)
    if load and rank == 0:
        model.load_state_dict(network(99).state_dict())
    wrapped = WRAPPERS[name](model)
    started = None
    for step in range(6):
        optimizer.zero_grad()
        with autoamp.scale_loss(wrapped(part_of(rank, step)).square().mean(), optimizer) as scaled:
            started = masters(optimizer) if started is None else started
            scaled.backward()
        average_by_hand(model, name)
        optimizer.step()
    found = {"started": started, "masters": masters(optimizer), "halves": [p.detach() for p in model.parameters()]}
    found = {key: [tensor.clone() for tensor in value] for key, value in found.items()}  # type: ignore[union-attr]
    handle.deactivate()
    return found


def fp16_optimizer(rank: int, first: str) -> list[Tensor]:
    """Train by `FP16_Optimizer`, made before or after the wrapper."""
    model = network(rank).half()
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if first == "wrapper":
        wrapped = DistributedDataParallel(model)
        optimizer = FP16_Optimizer(inner, static_loss_scale=64.0)
    else:
        optimizer = FP16_Optimizer(inner, static_loss_scale=64.0)
        wrapped = DistributedDataParallel(model)
    for step in range(4):
        optimizer.zero_grad()
        for half in part_of(rank, step).half().chunk(2):
            optimizer.backward(wrapped(half).float().square().mean() / 2)
        optimizer.step()
    return masters(optimizer)


def accumulate(rank: int, name: str, scale: float, count: int, no_sync: bool, seen: dict[str, Any]) -> None:
    """Add the gradients of many blocks, against the exact sum of what each block alone gives."""
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = o2(model, optimizer, torch.float16, scale)
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
            grad /= WORLD
    exact = [torch.stack(grads).sum(0) for grads in zip(*parts, strict=True)]
    largest = max(float(grad.abs().max()) for grad in exact)
    seen["error"] = max(float((a - b).abs().max()) for a, b in zip(together, exact, strict=True)) / largest
    seen["grads"] = together
    handle.deactivate()


def accumulated(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("torch", "views", "apex", "by hand"):
        for scale, count in ((1024.0, 16), (65536.0, 4)):
            accumulate(rank, name, scale, count, False, found.setdefault(f"{name} {scale:g}", {}))
    accumulate(rank, "torch", 64.0, 8, True, found.setdefault("no_sync", {}))
    return found


def two_passes(rank: int) -> dict[str, list[Tensor]]:
    """Passes that are all reduced add up; what a ``zero_grad()`` within a block dropped is gone."""
    found = {}
    for clears in (False, True):
        model = network(0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        handle = o2(model, optimizer, torch.float16)
        wrapped = DistributedDataParallel(model)
        for step in range(3):
            loss = wrapped(part_of(rank, step)).float().square().mean()
            with autoamp.scale_loss(loss, optimizer) as scaled:
                if clears:
                    model.zero_grad()
                scaled.backward()
        found["cleared" if clears else "added"] = [param.grad.clone() for param in masters_of(optimizer)]
        handle.deactivate()
    return found


def masters_of(optimizer: Any) -> list[Any]:
    return list(autoamp.master_params(optimizer))


def written(rank: int) -> list[Tensor]:
    """Average weights through ``.data`` in mid-training, and say so."""
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = o2(model, optimizer, torch.float16)
    for step in range(4):
        optimizer.zero_grad()
        with autoamp.scale_loss(model(part_of(rank, step)).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    for param in model.parameters():
        dist.all_reduce(param.data)
        param.data /= WORLD
    handle.masters_from_model()
    found = masters(optimizer)
    handle.deactivate()
    return found


def lopsided(rank: int) -> list[float]:
    """Reduce by Apex's wrapper where one rank alone has an earlier gradient, in fp32 beside the master."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"both": nn.Linear(8, 1), "first": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = o2(model, optimizer, torch.float16, 8.0)
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
    found = [float(param.grad.max()) for param in masters_of(optimizer)]
    handle.deactivate()
    return found


def found_by_rank() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {"accumulated": accumulated(rank), "passes": two_passes(rank), "lopsided": lopsided(rank)}
    for name in WRAPPERS:
        for half, dtype in HALVES.items():
            found[f"{name} {half}"] = train(rank, name, dtype)
        found[f"{name} loaded"] = train(rank, name, torch.float16, load=True)
    for first in ("wrapper", "optimizer"):
        found[f"fp16_optimizer {first}"] = fp16_optimizer(rank, first)
    found["written"] = written(rank)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two processes found."""
    return on_ranks(tmp_path_factory, WORLD, found_by_rank)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", WRAPPERS)
def test_masters_are_equal_on_all_ranks(ranks: list[Any], name: str, half: str) -> None:
    one, other = (found[f"{name} {half}"] for found in ranks)
    assert same(one["masters"], other["masters"])
    assert same(one["halves"], other["halves"])
    assert not same(one["masters"], one["started"])


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_rank_0_loaded_goes_to_all(ranks: list[Any], name: str) -> None:
    one, other = (found[f"{name} loaded"] for found in ranks)
    assert same(one["masters"], other["masters"])
    loaded = [param.detach() for param in network(99).parameters()]
    if name != "by hand":
        # Unrounded: a run that is resumed before it is wrapped is bitwise the run that went on.
        assert same(one["started"], loaded)
        assert same(other["started"], loaded)


@pytest.mark.parametrize("first", ["wrapper", "optimizer"])
def test_fp16_optimizer_is_equal_on_all_ranks(ranks: list[Any], first: str) -> None:
    one, other = (found[f"fp16_optimizer {first}"] for found in ranks)
    assert same(one, other)


@pytest.mark.parametrize("name", ["torch", "views", "apex", "by hand"])
@pytest.mark.parametrize("scale", ["1024", "65536"])
def test_gradients_add_up_in_fp32(ranks: list[Any], name: str, scale: str) -> None:
    # Apex's wrapper averages the sums, where the parts that they are compared with were averaged in half precision.
    bound = 2e-4 if name == "apex" else 1e-6
    for found in ranks:
        assert found["accumulated"][f"{name} {scale}"]["error"] < bound


def test_what_no_sync_left_is_reduced(ranks: list[Any]) -> None:
    one, other = (found["accumulated"]["no_sync"] for found in ranks)
    assert same(one["grads"], other["grads"])
    assert one["error"] < 2e-3


def test_passes_without_no_sync(ranks: list[Any]) -> None:
    one, other = (found["passes"] for found in ranks)
    assert same(one["added"], other["added"])
    assert same(one["cleared"], other["cleared"])
    added, cleared = (torch.cat([grad.flatten() for grad in one[key]]) for key in ("added", "cleared"))
    assert added.norm() > 1.5 * cleared.norm()


def test_an_earlier_gradient_of_one_rank_alone(ranks: list[Any]) -> None:
    for found in ranks:
        # Each block gives 1: two of them on each rank, and one on one rank of two.
        assert found["lopsided"] == [2.0, 2.0, 0.5, 0.5]


def test_masters_from_model(ranks: list[Any]) -> None:
    assert same(ranks[0]["written"], ranks[1]["written"])
