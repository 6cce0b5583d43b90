"""Ranks of a process group agree on what overflowed, whoever's it was. On two spawned processes, over gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autoamp

pytestmark = pytest.mark.processes

RANKS = 2
# No op is cast, so that gradients are those of plain torch.
NO_CASTS: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16, "lists": {"extends": []}}
INF = float("inf")


def make() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.randn(3, 4) * (dist.get_rank() + 1)


def values(model: nn.Module) -> list[Tensor]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [tensor.detach().clone() for tensor in whole]


@contextlib.contextmanager
def scaling(on: bool) -> Iterator[Callable[[], Any]]:
    """Scale automatically, or leave torch as it is. Gives what tells of skips and the scale."""
    if not on:
        yield lambda: None
        return
    handle = autoamp.init(**NO_CASTS)
    handle.auto_scale()
    try:
        yield lambda: (handle.skipped_steps, handle.loss_scale)
    finally:
        handle.deactivate()


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(RANKS)  # type: ignore[union-attr]


def train(model: nn.Module, backward: Callable[[nn.Module, float], None], told: Callable[[], Any]) -> list[Any]:
    """Take three steps, of which the second overflows on rank 0. Returns what each step left."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    left = [values(model)]
    for factor in (1.0, INF if dist.get_rank() == 0 else 1.0, 1.0):
        if told() is None and len(left) == 2:
            # Plain torch would step with it.
            left.append(left[-1])
            continue
        optimizer.zero_grad()
        backward(model, factor)
        optimizer.step()
        left.append(values(model))
    return [left, told()]


# -- programs, each run on all ranks, scaled or not --


def ddp(on: bool, hide: bool = False, **settings: Any) -> list[Any]:
    model, x = make()
    with scaling(on) as told:
        if hide:
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: gradient.nan_to_num(0.0, 1.0, -1.0))
        wrapped = DistributedDataParallel(model, **settings)

        def backward(_: nn.Module, factor: float) -> None:
            with wrapped.no_sync():
                (wrapped(x).square().mean() * factor).backward()
            wrapped(x * 2).square().mean().backward()

        return train(model, backward, told)


def ddp_with_views(on: bool) -> list[Any]:
    return ddp(on, gradient_as_bucket_view=True)


def ddp_that_hides(on: bool) -> list[Any]:
    return ddp(on, hide=True)


def reduced_by_hand(on: bool) -> list[Any]:
    model, x = make()
    with scaling(on) as told:

        def backward(model: nn.Module, factor: float) -> None:
            (model(x).square().mean() * factor).backward()
            average(model)

        return train(model, backward, told)


def reduced_after_a_block(on: bool) -> list[Any]:
    model, x = make()
    if not on:
        return reduced_by_hand(False)
    handle = autoamp.init(**NO_CASTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    left = [values(model)]
    for factor in (1.0, INF if dist.get_rank() == 0 else 1.0, 1.0):
        optimizer.zero_grad()
        with handle.scale_loss(model(x).square().mean() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        average(model)
        optimizer.step()
        left.append(values(model))
    told = handle.skipped_steps, handle.loss_scale
    handle.deactivate()
    return [left, told]


def shards(on: bool, parts: Callable[[nn.Sequential], list[nn.Module]]) -> list[Any]:
    model, x = make()
    with scaling(on) as told:
        for part in parts(model):
            fully_shard(part)

        def backward(model: nn.Module, factor: float) -> None:
            (model(x).square().mean() * factor).backward()
            for parameter in model.parameters():
                if not hasattr(parameter, "full_tensor"):
                    dist.all_reduce(parameter.grad)
                    parameter.grad.div_(RANKS)  # type: ignore[union-attr]

        return train(model, backward, told)


def shards_of_a_part(on: bool) -> list[Any]:
    return shards(on, lambda model: [model[0]])


def shards_of_all(on: bool) -> list[Any]:
    return shards(on, lambda model: [model[0], model])


def parallel_tensors(on: bool) -> list[Any]:
    """Parameters that are distributed tensors themselves, as leaves of the graph."""
    model, _ = make()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with scaling(on) as told:
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)

        def backward(model: nn.Module, factor: float) -> None:
            (model(x).square().mean() * factor).backward()

        return train(model, backward, told)


def flat_shards() -> list[str]:
    """Return what `FullyShardedDataParallel` is refused with: of a part, or of all, in both of its ways."""
    messages = []
    with scaling(on=True):
        for keeps_originals in (False, True):
            for wrap in (lambda model, fsdp: nn.Sequential(fsdp(model[0]), model[2]), lambda model, fsdp: fsdp(model)):
                model, x = make()
                wrapped = wrap(
                    model,
                    lambda part, keeps=keeps_originals: FullyShardedDataParallel(
                        part, use_orig_params=keeps, device_id=torch.device("cpu")
                    ),
                )
                _optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
                with pytest.raises(autoamp.UsageError) as caught:
                    wrapped(x).sum().backward()
                messages.append(str(caught.value))
    return messages


PROGRAMS = [
    ddp,
    ddp_with_views,
    ddp_that_hides,
    reduced_by_hand,
    reduced_after_a_block,
    shards_of_a_part,
    shards_of_all,
    parallel_tensors,
]


def rank(index: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=index, world_size=RANKS)
    results: dict[Any, Any] = {}
    for program in PROGRAMS:
        for on in (False, True):
            try:
                results[program.__name__, on] = program(on)
            except Exception as error:
                results[program.__name__, on] = repr(error)
    results["flat"] = flat_shards()
    torch.save(results, f"{folder}/{index}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, bool], Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(rank, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{index}.pt") for index in range(RANKS)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_an_overflow_of_one_rank_is_one_of_all(results: Any, program: Any) -> None:
    runs = [result[program.__name__, True] for result in results]
    assert [type(run) for run in runs] == [list] * RANKS, runs
    for left, told in runs:
        assert told == (1, 2.0**15)
        torch.testing.assert_close(left[2], left[1], rtol=0.0, atol=0.0)
        assert not torch.equal(left[3][0], left[2][0])
    for one, other in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_steps_are_those_of_plain_torch(results: Any, program: Any) -> None:
    for result in results:
        plain, scaled = result[program.__name__, False], result[program.__name__, True]
        torch.testing.assert_close(scaled[0], plain[0])


def test_flat_parameters_are_refused_with_the_remedy(results: Any) -> None:
    for result in results:
        assert len(result["flat"]) == 4
        assert all("use bf16, which needs no loss scale" in message for message in result["flat"])
