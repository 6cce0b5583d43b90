"""Ranks of a process group agree on what overflowed, whoever it came from. On two spawned processes, over gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.integration.spawned import on_ranks

pytestmark = pytest.mark.processes

RANKS, STEPS, BAD_STEP = 2, 6, 3
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


def ddp_that_hides(on: bool) -> list[Any]:
    return ddp(on, hide=True)


def reduced_by_hand(on: bool) -> list[Any]:
    model, x = make()
    with scaling(on) as told:

        def backward(model: nn.Module, factor: float) -> None:
            (model(x).square().mean() * factor).backward()
            average(model)

        return train(model, backward, told)


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


# -- gradients that are reduced after their block --


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


def train_in_blocks(name: str) -> list[Any]:
    """Return for each step whether it was skipped and the scale; and the weights at the end."""
    rank = dist.get_rank()
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


PROGRAMS = [
    ddp,
    ddp_that_hides,
    reduced_by_hand,
    shards_of_a_part,
    shards_of_all,
    parallel_tensors,
]


def found_by_rank() -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for program in PROGRAMS:
        for on in (False, True):
            try:
                results[program.__name__, on] = program(on)
            except Exception as error:
                results[program.__name__, on] = repr(error)
    results["flat"] = flat_shards()
    results["blocks"] = {name: train_in_blocks(name) for name in WAYS}
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, bool], Any]]:
    return on_ranks(tmp_path_factory, RANKS, found_by_rank)


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


@pytest.mark.parametrize("name", WAYS)
def test_inf_that_a_reduction_brings_after_the_block_is_seen_before_the_step(results: Any, name: str) -> None:
    (one, weights), (other, others) = (found["blocks"][name] for found in results)
    assert one == other
    assert weights == others
    assert [skipped for skipped, _ in one] == [step == BAD_STEP for step in range(STEPS)]
    assert [scale for _, scale in one] == [2.0**10] * BAD_STEP + [2.0**9] * (STEPS - BAD_STEP)
