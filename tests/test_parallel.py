"""Processes that train together against one that has the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoamp
from autoamp import parallel
from autoamp.errors import UsageError
from autoamp.parallel import multiproc

WORLD = 2


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def batch() -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(7))


def join(rank: int, store: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def ddp_worker(rank: int, store: str, out: str) -> None:
    join(rank, store, WORLD)
    found: dict[str, Any] = {}
    for name, options in {
        "plain": {},
        "predivide": {"gradient_predivide_factor": 2.0, "allreduce_always_fp32": True},
        "sum": {"gradient_average": False},
    }.items():
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        torch.manual_seed(rank)
        for param in net.parameters():
            nn.init.normal_(param)
        ddp = parallel.DistributedDataParallel(net, **options)
        found[name] = {"weights": copy.deepcopy(net.state_dict())}
        part = batch().chunk(WORLD)[rank]
        for half in part.chunk(2) if name == "plain" else [part]:
            loss = ddp(half).square().mean() * (0.5 if name == "plain" else 1.0)
            loss.backward()
        found[name]["grads"] = [param.grad for param in net.parameters()]
    unused = nn.ModuleDict({"both": nn.Linear(4, 1), "first": nn.Linear(4, 1), "none": nn.Linear(4, 1)})
    ddp = parallel.DistributedDataParallel(unused)
    loss = unused["both"](batch()).sum() + (unused["first"](batch()).sum() if rank == 0 else 0.0)
    loss.backward()
    found["first"] = unused["first"].bias.grad
    found["none"] = unused["none"].bias.grad
    ddp.disable_allreduce()
    unused.zero_grad()
    (unused["both"](batch()).sum() * rank).backward()
    found["disabled"] = unused["both"].bias.grad.clone()
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


def syncbn_worker(rank: int, store: str, out: str) -> None:
    join(rank, store, WORLD)
    net = parallel.convert_syncbn_model(model_of(0))
    given = batch().split([3, 5])[rank].requires_grad_()
    output = net(given)
    output.square().sum().backward()
    found = {"output": output.detach(), "input_grad": given.grad, "state": net.state_dict()}
    found["grads"] = [param.grad for param in net.parameters()]
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


def run(worker: Callable[..., None], path: Path) -> list[Any]:
    torch.multiprocessing.spawn(worker, (str(path / "store"), str(path)), nprocs=WORLD)
    return [torch.load(path / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    found = run(ddp_worker, tmp_path)
    for name in ("plain", "predivide", "sum"):
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        net.load_state_dict(found[0][name]["weights"])
        net(batch()).square().mean().backward()
        for rank in range(WORLD):
            torch.testing.assert_close(found[rank][name]["weights"], found[0][name]["weights"], rtol=0, atol=0)
            expected = [param.grad * (WORLD if name == "sum" else 1) for param in net.parameters()]
            torch.testing.assert_close(found[rank][name]["grads"], expected)
    for rank in range(WORLD):
        assert found[rank]["first"].item() == 8 / WORLD
        assert found[rank]["none"] is None
        assert found[rank]["disabled"].item() == 8 * rank


def test_sync_batch_norm_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    found = run(syncbn_worker, tmp_path)
    net, given = model_of(0), batch().requires_grad_()
    output = net(given)
    output.square().sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(torch.cat([part["output"] for part in found]), output.detach(), **close)
    torch.testing.assert_close(torch.cat([part["input_grad"] for part in found]), given.grad, **close)
    for index, param in enumerate(net.parameters()):
        torch.testing.assert_close(sum(part["grads"][index] for part in found), param.grad, **close)
    for part in found:
        torch.testing.assert_close(part["state"], dict(net.state_dict()), **close)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("first", ["initialize", "parallel"])
def test_trains_with_levels(level: str, first: str) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    options = {"opt_level": level, "dtype": torch.bfloat16, "device_type": "cpu", "verbosity": 0}
    model: Any = parallel.DistributedDataParallel(net) if first == "parallel" else net
    model, optimizer = autoamp.initialize(model, optimizer, **options)
    model = model if first == "parallel" else parallel.DistributedDataParallel(model)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(batch()).float().square().mean()
        with autoamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(key.startswith("module.") for key in model.state_dict())


@pytest.mark.usefixtures("one_process")
def test_a_backward_that_raised_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(4, 1)
    ddp = parallel.DistributedDataParallel(net, gradient_predivide_factor=2.0)
    reduced = []
    monkeypatch.setattr(ddp, "_reduce_bucket", reduced.append)
    given = batch().requires_grad_()
    given.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp(given).sum().backward()
    reduced.clear()
    ddp(batch()).sum().backward()
    assert len(reduced) == 1


@pytest.mark.parametrize("kind", [parallel.DistributedDataParallel, parallel.Reducer])
def test_needs_a_process_group(kind: type) -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        kind(nn.Linear(2, 2))


@pytest.mark.usefixtures("one_process")
def test_shared_param_is_refused() -> None:
    with pytest.raises(ValueError, match="shared_param"):
        parallel.DistributedDataParallel(nn.Linear(2, 2), shared_param=True)


def test_convert_without_a_group() -> None:
    net = model_of(0)
    shared = nn.BatchNorm1d(3)
    tree = nn.ModuleDict({"net": net, "a": shared, "b": shared, "i": nn.InstanceNorm1d(3)}).eval()
    plain, weight = copy.deepcopy(net).train(), net[1].weight
    parallel.convert_syncbn_model(tree)
    assert isinstance(net[1], parallel.SyncBatchNorm)
    assert net[1].weight is weight
    assert not net[1].training
    assert tree["a"] is tree["b"]
    assert isinstance(tree["b"], parallel.SyncBatchNorm)
    assert type(tree["i"]) is nn.InstanceNorm1d
    assert torch.equal(net.train()(batch()), plain(batch()))
    torch.testing.assert_close(dict(net.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


def test_channel_last_and_relu() -> None:
    given, added = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    norm = parallel.SyncBatchNorm(4, channel_last=True, fuse_relu=True)
    plain = nn.BatchNorm1d(4)(given.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(norm(given, added), (plain + added).relu())


@pytest.mark.usefixtures("one_process")
def test_process_groups() -> None:
    assert parallel.create_syncbn_process_group(0) is None
    with pytest.raises(ValueError, match="group_size=3"):
        parallel.create_syncbn_process_group(3)


def test_multiproc(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "pathlib.Path(__file__).with_name('rank' + os.environ['RANK']).write_text(' '.join(sys.argv[1:]))\n"
        "sys.exit(3 * int(os.environ['RANK']))\n"
    )
    assert multiproc.main([str(script), "--world-size", "2", "x"]) == 3
    assert (tmp_path / "rank1").read_text() == "--world-size 2 x --rank 1"
