"""A rank that has no gradients in a step: an expert without tokens, a frozen stage, an empty shard. No rank hangs.

On two processes over gloo, whose collectives give up after some seconds.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.integration.collectives import counted
from tests.integration.spawned import on_ranks

pytestmark = pytest.mark.processes

RANKS, IDLE, BUSY = 2, 1, 0
INF = float("inf")
SCALE = 2.0**10
WAYS = ("scale_loss", "auto_scale", "O2")
# In these steps rank 1 has nothing to do; the second of four overflows, on rank 0 or on either.
WHEN = {"never": (), "first": (0,), "as rank 0 overflows": (1,), "always": (0, 1, 2, 3)}
STEPS, BAD_STEP = 4, 1


class Experts(nn.Module):
    """A layer that all ranks have and reduce by themselves, and an expert of this rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, idle: bool) -> Tensor:
        y: Tensor = self.shared(x)
        return y.float().sum() if idle else self.expert(y).float().sum()


class Stage(nn.Module):
    """Parameters that belong to this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, idle: bool) -> Tensor:
        y: Tensor = self.layer(x).float().sum()
        return y.detach() if idle else y


class Sharded(Stage):
    """The same on a mesh: each rank multiplies by its rows, and has no gradient where it has no tokens."""

    def shard(self) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        for name, param in list(self.layer.named_parameters()):
            whole = DTensor.from_local(param.detach(), mesh, [Shard(0)], run_check=False)
            setattr(self.layer, name, nn.Parameter(whole))

    def forward(self, x: Tensor, idle: bool) -> Tensor:
        weight, bias = (param.to_local() for param in self.layer.parameters())  # type: ignore[attr-defined]
        y = nn.functional.linear(x.to(weight.dtype), weight, bias).float().sum()
        return y.detach() if idle else y


def local(tensor: Any) -> Tensor:
    found: Tensor = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return found


@contextlib.contextmanager
def initialized(way: str, model: nn.Module) -> Iterator[Any]:
    options: dict[str, Any] = {"dtype": torch.float16, "device_type": "cpu"}
    scaler = autoamp.DynamicLossScaler(SCALE)
    if way == "O2":
        autoamp.initialize(model, opt_level="O2", loss_scale=scaler, verbosity=0, **options)
    else:
        autoamp.init(loss_scale=scaler, **options)
    handle: Any = autoamp.current_handle()
    if way == "auto_scale":
        handle.auto_scale()
    try:
        yield handle
    finally:
        handle.deactivate()


def reduce_shared(model: Any) -> None:
    if isinstance(model, Experts):
        for param in model.shared.parameters():
            dist.all_reduce(param.grad)


def train(way: str, kind: str, when: tuple[int, ...], clips: bool) -> list[Any]:
    """Take the steps; returns for each whether parameters stayed, the scale and the collectives of the step."""
    torch.manual_seed(dist.get_rank())
    model: Any = {"experts": Experts, "stage": Stage, "mesh": Sharded}[kind]()
    told: list[Any] = []
    with initialized(way, model) as handle:
        if kind == "mesh":
            model.shard()
        else:
            handle.sync_over(dist.group.WORLD, replicas=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        for step in range(STEPS):
            idle = dist.get_rank() == IDLE and step in when
            before = [local(param) for group in optimizer.param_groups for param in group["params"]]
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4), idle) * (INF if step == BAD_STEP and dist.get_rank() == BUSY else 1.0)
            if way != "auto_scale":
                with handle.scale_loss(loss, optimizer) as scaled:
                    if scaled.requires_grad:
                        scaled.backward()
            elif loss.requires_grad:
                loss.backward()
            reduce_shared(model)
            with counted() as calls:
                if clips:
                    handle.clip_grad_norm_(optimizer, 1e9)
                optimizer.step()
            now = [local(param) for group in optimizer.param_groups for param in group["params"]]
            told.append((all(map(torch.equal, before, now)), handle.loss_scale, calls()))
        told.append(handle.skipped_steps)
    return told


def unused(way: str) -> list[Any]:
    """DistributedDataParallel where rank 1 uses one layer of two."""
    torch.manual_seed(0)
    model: Any = Experts()
    with initialized(way, model) as handle:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        told: list[Any] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = wrapped(torch.ones(2, 4), dist.get_rank() == IDLE)
            loss = loss * (INF if step == BAD_STEP and dist.get_rank() == BUSY else 1.0)
            if way == "auto_scale":
                loss.backward()
            else:
                with handle.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
            told.append(([local(param) for param in model.parameters()], handle.loss_scale))
        return [*told, handle.skipped_steps]


def empty_shards(way: str) -> list[Any]:
    """Parameters of one element, of which rank 1 has nothing."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with initialized(way, model) as handle:
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        told: list[Any] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).float().sum() * (INF if step == BAD_STEP else 1.0)
            if way == "auto_scale":
                loss.backward()
            else:
                with handle.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            norm = float(handle.clip_grad_norm_(optimizer, 1e9))
            optimizer.step()
            told.append((norm, handle.loss_scale))
        return [*told, handle.skipped_steps]


def found_by_rank() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for way, kind, (when, steps), clips in itertools.product(WAYS, KINDS, WHEN.items(), (False, True)):
        found[way, kind, when, clips] = train(way, kind, steps, clips)
    for way in WAYS:
        found["unused", way] = unused(way)
        found["empty", way] = empty_shards(way)
    return found


KINDS = ("experts", "stage", "mesh")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    # A rank that waits for another one that does not come ends with an error.
    return on_ranks(tmp_path_factory, RANKS, found_by_rank, timeout=20.0)


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_without_gradients_agrees_with_the_others(
    ranks: list[Any], way: str, kind: str, when: str, clips: bool
) -> None:
    for index, found in enumerate(ranks):
        *steps, skipped = found[way, kind, when, clips]
        assert skipped == 1
        assert [scale for _, scale, _ in steps] == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
        # A rank that knows nothing of an overflow yet has to ask in each step, and never twice.
        assert [collectives for *_, collectives in steps] == [1] * STEPS
        idle = WHEN[when] if index == IDLE and kind != "experts" else ()
        assert [stayed for stayed, *_ in steps] == [step == BAD_STEP or step in idle for step in range(STEPS)]


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_one_rank_does_not_use(ranks: list[Any], way: str) -> None:
    one, other = (found["unused", way] for found in ranks)
    assert one[-1] == other[-1] == 1
    for (values, scale), (others, other_scale) in zip(one[:-1], other[:-1], strict=True):
        assert scale == other_scale
        assert all(map(torch.equal, values, others))
    before, skipped, after = (values for values, _ in one[:3])
    assert all(map(torch.equal, before, skipped))
    assert not any(map(torch.equal, skipped, after))


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_whose_shards_are_empty(ranks: list[Any], way: str) -> None:
    for found in ranks:
        *steps, skipped = found["empty", way]
        assert skipped == 1
        assert [scale for _, scale in steps] == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
        # Of two samples of ones: 2 for each of four weights and the bias.
        assert [norm for norm, _ in steps] == pytest.approx([INF if n == BAD_STEP else 20.0**0.5 for n in range(STEPS)])
