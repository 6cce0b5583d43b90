"""Processes that train together against one that has the whole batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoamp
from autoamp import parallel
from autoamp.apex.parallel import multiproc
from autoamp.errors import UsageError
from tests.integration.spawned import counted, on_ranks

WORLD = 2


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def batch() -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(7))


def ddp_of(rank: int, seed: int = 0, **options: Any) -> tuple[nn.Module, parallel.DistributedDataParallel]:
    """Return a net with weights of this rank's own, and its wrapper, which gives it those of rank 0."""
    torch.manual_seed(seed + rank)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    return net, parallel.DistributedDataParallel(net, **options)


def grads_of(net: nn.Module) -> list[torch.Tensor]:
    return [param.grad.clone() for param in net.parameters()]


def averages(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {
        "plain": {},
        "predivide": {"gradient_predivide_factor": 2.0, "allreduce_always_fp32": True},
    }.items():
        net, ddp = ddp_of(rank, **options)
        found[name] = {"weights": copy.deepcopy(net.state_dict())}
        parts = batch().chunk(WORLD)[rank].chunk(2)
        for part in parts:
            (ddp(part).square().mean() / len(parts)).backward()
        found[name]["grads"] = grads_of(net)
    return found


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.first = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, given: torch.Tensor, *names: str) -> torch.Tensor:
        return torch.stack([getattr(self, name)(given).sum() for name in names]).sum()


def unused(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    net = nn.ModuleDict({"both": nn.Linear(4, 1), "first": nn.Linear(4, 1), "none": nn.Linear(4, 1)})
    ddp = parallel.DistributedDataParallel(net)
    loss = net["both"](batch()).sum() + (net["first"](batch()).sum() if rank == 0 else 0.0)
    loss.backward()
    found["first"] = net["first"].bias.grad
    found["none"] = net["none"].bias.grad
    ddp.disable_allreduce()
    net.zero_grad()
    (net["both"](batch()).sum() * rank).backward()
    found["disabled"] = net["both"].bias.grad.clone()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        table = parallel.DistributedDataParallel(nn.Embedding(3, 1, sparse=rank == 0, dtype=dtype))
        table(torch.tensor([rank, rank, 2])).sum().backward()
        found[f"sparse {dtype}"] = table.module.weight.grad
    return found


def reduced(rank: int) -> dict[str, Any]:
    net = nn.Linear(2, 1)
    nn.init.constant_(net.weight, float(rank + 1))
    reducer = parallel.Reducer(net)
    found: dict[str, Any] = {"weight": net.weight.detach().clone()}
    (net(torch.ones(1, 2)).sum() * (rank + 1)).backward()
    reducer.reduce()
    found["grads"] = grads_of(net)
    tensors = [torch.full((2,), float(rank)), torch.full((3,), 2.0 * rank).double(), torch.full((1, 2), 4.0 * rank)]
    parallel.Reducer(tensors).reduce()
    found["tensors"] = tensors
    given = [torch.full((2,), rank), torch.full((1,), float(rank))]
    parallel.flat_dist_call(given, dist.broadcast, (1,))
    found["broadcast"] = given
    return found


# The shape of the whole batch and the options.
NORMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((8, 4, 3), {}),
    "rows": ((8, 70), {}),
    "mean of batches": ((8, 4, 3, 2), {"momentum": None}),
    "channel last": ((8, 3, 4), {"channel_last": True}),
    "without statistics": ((8, 4, 1), {"track_running_stats": False, "affine": False}),
}
# Squares of values this far from zero leave no digits for their variance.
FAR = 1e6


def normed(rank: int) -> dict[str, Any]:
    """Normalize twice, in uneven parts, in fp32 and in half precision."""
    found: dict[str, Any] = {}
    for name, (_, options) in NORMS.items():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            norm = parallel.SyncBatchNorm(70 if name == "rows" else 4, **options)
            for step in range(2):
                part = part_of(given_to(name, step), rank).to(dtype).requires_grad_()
                output = norm(part)
                (output.float() * weights_of(output, rank)).sum().backward()
            state = {key: value.clone() for key, value in norm.state_dict().items()}
            found[f"{name} {dtype}"] = output.detach(), part.grad, grads_of(norm), state
    part = part_of(given_to("plain", 0).double(), rank).requires_grad_()
    try:
        torch.autograd.grad(parallel.SyncBatchNorm(4).double()(part).cos().sum(), part, create_graph=True)
    except UsageError as error:
        found["twice"] = str(error)
    stopped = parallel.SyncBatchNorm(4)
    stopped.track_running_stats = False
    stopped(part_of(given_to("plain", 0), rank))
    found["statistics that no longer count"] = stopped.running_mean, stopped.num_batches_tracked
    found["far"] = parallel.SyncBatchNorm(70).double()(part_of(given_to("rows", 0).double() + FAR, rank)).detach()
    # All values are on one rank.
    found["empty"] = parallel.SyncBatchNorm(4)(given_to("plain", 0)[: 8 * rank]).detach()
    net = parallel.convert_syncbn_model(model_of(0))
    net(part_of(batch(), rank)).square().sum().backward()
    found["converted"] = grads_of(net)
    group = parallel.create_syncbn_process_group(1)
    found["alone"] = parallel.SyncBatchNorm(4, process_group=group)(part_of(given_to("plain", 0), rank)).detach()
    # torch's wrapper refuses torch's own SyncBatchNorm on a CPU.
    ddp = nn.parallel.DistributedDataParallel(parallel.convert_syncbn_model(model_of(0)))
    ddp(part_of(batch(), rank)).square().sum().backward()
    found["in torch's DDP"] = [grad * WORLD for grad in grads_of(ddp)]
    return found


def part_of(whole: torch.Tensor, rank: int) -> torch.Tensor:
    return whole.split([3, 5])[rank].clone()


def given_to(name: str, step: int) -> torch.Tensor:
    return torch.randn(NORMS[name][0], generator=torch.Generator().manual_seed(step)) + 1.0


def weights_of(output: torch.Tensor, rank: int | None) -> torch.Tensor:
    """Return factors of a loss for the whole batch, or for this rank's part."""
    whole = torch.randn(8, *output.shape[1:], generator=torch.Generator().manual_seed(9))
    return whole if rank is None else part_of(whole, rank)


def trained(rank: int | None) -> dict[str, Any]:
    """Train at both levels, on this rank's part, or on the whole batch with no wrapper."""
    found: dict[str, Any] = {}
    for level in ("O1", "O2"):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        optimizer: Any = torch.optim.SGD(net.parameters(), 0.05, momentum=0.5)
        net, optimizer = autoamp.initialize(
            net, optimizer, opt_level=level, dtype=torch.bfloat16, device_type="cpu", loss_scale=64.0, verbosity=0
        )
        model = net if rank is None else parallel.DistributedDataParallel(net)
        parts = batch().chunk(2) if rank is None else batch().chunk(WORLD)[rank].chunk(2)
        for _ in range(4):
            optimizer.zero_grad()
            for part in parts:
                with autoamp.scale_loss(model(part).float().square().mean() / 2, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
        found[level] = [param.detach().clone() for param in autoamp.master_params(optimizer)]
        handle = autoamp.current_handle()
        assert handle is not None
        handle.deactivate()
    return found


def work() -> dict[str, Any]:
    """Run everything that needs two processes: each process costs seconds."""
    parts = (averages, unused, reduced, normed, trained)
    return {part.__name__: part(dist.get_rank()) for part in parts}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two processes found."""
    return on_ranks(tmp_path_factory, WORLD, work)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["plain", "predivide"])
def test_gradients_are_those_of_the_whole_batch(ranks: list[Any], name: str) -> None:
    first = ranks[0]["averages"][name]
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    net.load_state_dict(first["weights"])
    net(batch()).square().mean().backward()
    for found in ranks:
        torch.testing.assert_close(found["averages"][name]["weights"], first["weights"], rtol=0, atol=0)
        torch.testing.assert_close(found["averages"][name]["grads"], grads_of(net))


def test_parameters_without_gradients(ranks: list[Any]) -> None:
    for rank, found in enumerate(ranks):
        assert found["unused"]["first"].item() == 8 / WORLD
        assert found["unused"]["none"] is None
        assert found["unused"]["disabled"].item() == 8 * rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sparse_gradients_become_dense(ranks: list[Any], dtype: torch.dtype) -> None:
    for found in ranks:
        grad = found["unused"][f"sparse {dtype}"]
        assert (grad.layout, grad.dtype, grad.flatten().tolist()) == (torch.strided, dtype, [1.0, 1.0, 1.0])


def test_reducer_and_flat_calls(ranks: list[Any]) -> None:
    for found in (part["reduced"] for part in ranks):
        assert found["weight"].tolist() == [[1.0, 1.0]]
        assert [grad.flatten().tolist() for grad in found["grads"]] == [[1.5, 1.5], [1.5]]
        assert [tensor.flatten().tolist() for tensor in found["tensors"]] == [[0.5, 0.5], [1.0, 1.0, 1.0], [2.0, 2.0]]
        assert found["tensors"][1].dtype is torch.float64
        assert [tensor.tolist() for tensor in found["broadcast"]] == [[1, 1], [1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_sync_batch_norm_is_that_of_the_whole_batch(ranks: list[Any], name: str, dtype: torch.dtype) -> None:
    found = [part["normed"][f"{name} {dtype}"] for part in ranks]
    shape, options = NORMS[name]
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    channels = 70 if name == "rows" else 4
    plain = kind(channels, **{key: value for key, value in options.items() if key != "channel_last"})
    for step in range(2):
        # Rounded as the ranks' input is, and then in fp32: what half precision costs is the output's rounding.
        given = given_to(name, step).to(dtype).float().requires_grad_()
        output = plain(given.transpose(1, 2)).transpose(1, 2) if "last" in name else plain(given)
        (output * weights_of(output, None)).sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert {part[0].dtype for part in found} == {dtype}
    torch.testing.assert_close(torch.cat([part[0] for part in found]).float(), output.detach(), **close)
    torch.testing.assert_close(torch.cat([part[1] for part in found]).float(), given.grad, **close)
    for index, param in enumerate(plain.parameters()):
        torch.testing.assert_close(sum(part[2][index] for part in found), param.grad, rtol=2e-2, atol=2e-2)
    for part in found:
        torch.testing.assert_close(part[3], dict(plain.state_dict()), rtol=1e-4, atol=1e-4)


def test_second_derivatives_are_refused(ranks: list[Any]) -> None:
    assert all("create_graph=True" in found["normed"]["twice"] for found in ranks)


def test_a_rank_without_values_takes_part(ranks: list[Any]) -> None:
    expected = nn.BatchNorm1d(4)(given_to("plain", 0)).detach()
    assert ranks[0]["normed"]["empty"].shape == (0, 4, 3)
    torch.testing.assert_close(ranks[1]["normed"]["empty"], expected, rtol=1e-4, atol=1e-5)


def test_parts_far_from_zero_are_put_together_without_losing_digits(ranks: list[Any]) -> None:
    expected = nn.BatchNorm1d(70).double()(given_to("rows", 0).double() + FAR).detach()
    torch.testing.assert_close(torch.cat([found["normed"]["far"] for found in ranks]), expected, rtol=1e-7, atol=1e-7)


def test_converted_batch_norm_is_that_of_the_whole_batch(ranks: list[Any]) -> None:
    net = model_of(0)
    net(batch()).square().sum().backward()
    for index, param in enumerate(net.parameters()):
        both = sum(found["normed"]["converted"][index] for found in ranks)
        torch.testing.assert_close(both, param.grad, rtol=1e-4, atol=1e-4)
        for found in ranks:
            reduced = found["normed"]["in torch's DDP"][index]
            torch.testing.assert_close(reduced, param.grad, rtol=1e-4, atol=1e-4)


def test_groups_of_one_normalise_alone(ranks: list[Any]) -> None:
    for rank, found in enumerate(ranks):
        expected = nn.BatchNorm1d(4)(part_of(given_to("plain", 0), rank))
        torch.testing.assert_close(found["normed"]["alone"], expected.detach())


def test_statistics_stop_where_the_program_says_so(ranks: list[Any]) -> None:
    for found in ranks:
        mean, batches = found["normed"]["statistics that no longer count"]
        assert mean.tolist() == [0.0] * 4
        assert batches == 0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_levels_train_over_processes_as_on_one(ranks: list[Any], level: str) -> None:
    expected = trained(None)[level]
    torch.testing.assert_close(ranks[0]["trained"][level], ranks[1]["trained"][level], rtol=0, atol=0)
    torch.testing.assert_close(ranks[0]["trained"][level], expected, rtol=2e-2, atol=2e-3)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_levels_take_a_wrapped_model(level: str) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model: Any = parallel.DistributedDataParallel(net)
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.05)
    options = {"opt_level": level, "dtype": torch.bfloat16, "device_type": "cpu", "verbosity": 0}
    model, optimizer = autoamp.initialize(model, optimizer, **options)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(batch()).float().square().mean()
        with autoamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(key.startswith("module.") for key in model.state_dict())


KINDS = [parallel.DistributedDataParallel, parallel.Reducer]


@pytest.mark.parametrize("kind", KINDS)
def test_several_processes_need_a_group(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"WORLD_SIZE=2.*init_process_group"):
        kind(nn.Linear(2, 2))


@pytest.mark.parametrize("grouped", [False, True], ids=["no group", "group of one"])
def test_one_process_trains_as_without(request: pytest.FixtureRequest, grouped: bool) -> None:
    if grouped:
        request.getfixturevalue("one_process")
    net = model_of(0)
    plain = copy.deepcopy(net)
    net = parallel.convert_syncbn_model(net, parallel.create_syncbn_process_group(1))
    ddp = parallel.DistributedDataParallel(net, gradient_predivide_factor=4.0)
    for model in (ddp, plain):
        for _ in range(2):
            model(batch()).square().mean().backward()
    reducer = parallel.Reducer(net)
    reducer.reduce()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(ddp.state_dict(), {f"module.{k}": v for k, v in plain.state_dict().items()})


def test_a_group_that_comes_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, reducer = parallel.DistributedDataParallel(nn.Linear(4, 1)), parallel.Reducer([torch.ones(1)])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(UsageError, match="before the process group of 2"):
        ddp(batch())
    with pytest.raises(UsageError, match="before the process group of 2"):
        reducer.reduce()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("how", ["copied", "pickled", "new parameter"])
def test_parameters_that_take_the_place_of_others_are_watched(how: str) -> None:
    ddp = parallel.DistributedDataParallel(nn.Linear(4, 1))
    ddp(batch()).sum().backward()
    if how == "copied":
        ddp = copy.deepcopy(ddp)
    elif how == "pickled":
        ddp = pickle.loads(pickle.dumps(ddp))
    else:
        # Freed first: the new parameter may lie at the old one's address.
        del ddp.module.weight
        ddp.module.weight = nn.Parameter(torch.ones(1, 4))
        ddp.module.bias.requires_grad_(False)
    for _ in range(2):
        ddp.zero_grad()
        with counted() as calls:
            ddp(batch()).sum().backward()
        # Which parameters have a gradient on some rank, and the gradients.
        assert calls() == 2


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("options", "told"), [({"shared_param": True}, "leave it out"), ({"gradient_average": False}, "world size")]
)
def test_arguments_that_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parallel.DistributedDataParallel(nn.Linear(2, 2), **options)


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


def test_shapes_that_have_no_channels() -> None:
    norm = parallel.SyncBatchNorm(4)
    with pytest.raises(ValueError, match=r"not \(4,\)"):
        norm(torch.randn(4))
    with pytest.raises(ValueError, match="at least one channel"):
        norm(torch.randn(3, 0))


def test_channel_last_and_relu() -> None:
    given, added = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    norm = parallel.SyncBatchNorm(4, channel_last=True, fuse_relu=True)
    plain = nn.BatchNorm1d(4)(given.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(norm(given, added), (plain + added).relu())


@pytest.mark.parametrize("grouped", [False, True], ids=["no group", "group of one"])
def test_process_groups(request: pytest.FixtureRequest, grouped: bool) -> None:
    if grouped:
        request.getfixturevalue("one_process")
    assert parallel.create_syncbn_process_group(0) is None
    assert (parallel.create_syncbn_process_group(1) is None) is not grouped
    for size in (3, -1):
        with pytest.raises(ValueError, match=f"group_size={size} must divide the world size 1"):
            parallel.create_syncbn_process_group(size)


def test_half_input_beside_fp32_weights_in_evaluation(half: torch.dtype) -> None:
    given = torch.randn(6, 4, 3).to(half)
    output = parallel.SyncBatchNorm(4).eval()(given)
    assert output.dtype is half
    torch.testing.assert_close(output.float(), given.float(), rtol=2e-2, atol=2e-2)


# -- LARC --


def larc_of(clip: bool, **options: Any) -> tuple[list[torch.Tensor], parallel.LARC]:
    torch.manual_seed(3)
    params = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.randn(4))]
    sgd = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}], lr=0.1, **options)
    return params, parallel.LARC(sgd, trust_coefficient=0.02, clip=clip)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_larc_follows_the_formula(clip: bool, size: float) -> None:
    params, larc = larc_of(clip, weight_decay=0.1)
    decays = [0.1, 0.1, 0.0]
    expected = [param.detach().double() for param in params]
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        for index, param in enumerate(params):
            param.grad = size * torch.randn(param.shape, generator=generator)
            value, grad, decay = expected[index], param.grad.double(), decays[index]
            if value.norm() != 0:
                rate = 0.02 * value.norm() / (grad.norm() + decay * value.norm() + 1e-8)
                grad = (grad + decay * value) * (min(rate / 0.1, 1.0) if clip else rate)
            expected[index] = value - 0.1 * grad
        larc.step()
    for param, value in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().double(), value, rtol=1e-5, atol=1e-7)
    assert [group["weight_decay"] for group in larc.param_groups] == [0.1, 0.0]


def test_larc_leaves_what_has_no_gradient_and_what_is_zero() -> None:
    params, larc = larc_of(True)
    params[0].grad = torch.zeros(3, 2)
    params[1].grad = torch.ones(2)
    before = [param.detach().clone() for param in params]
    larc.step()
    assert torch.equal(params[0], before[0])
    # A parameter that is 0 is stepped by its gradient as it is.
    torch.testing.assert_close(params[1].detach(), torch.full((2,), -0.1))
    assert torch.equal(params[2], before[2])


def test_larc_takes_half_parameters_of_any_size() -> None:
    # The norm of the parameter, 80000, is beyond fp16.
    param = nn.Parameter(torch.full((4,), 40000.0).half())
    larc = parallel.LARC(torch.optim.SGD([param], lr=1.0), trust_coefficient=0.1, clip=False)
    param.grad = torch.full((4,), 20000.0).half()
    larc.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), 36000.0).half())


def test_larc_refuses_sparse_gradients() -> None:
    table, other = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2))
    larc = parallel.LARC(torch.optim.SGD([other, table.weight], lr=0.1, weight_decay=0.5))
    table(torch.arange(2)).sum().backward()
    other.grad = torch.ones(2)
    with pytest.raises(UsageError, match="sparse=False"):
        larc.step()
    assert torch.equal(other.grad, torch.ones(2))
    assert larc.param_groups[0]["weight_decay"] == 0.5


def test_larc_restores_the_decay_when_the_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    params, larc = larc_of(True, weight_decay=0.1)
    params[0].grad = torch.ones(3, 2)
    monkeypatch.setattr(larc.optim, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        larc.step()
    assert [group["weight_decay"] for group in larc.param_groups] == [0.1, 0.0]


def test_larc_stands_for_its_optimizer() -> None:
    params, larc = larc_of(True, momentum=0.9)
    assert isinstance(larc, torch.optim.Optimizer)
    assert larc.param_groups is larc.optim.param_groups
    steps: list[Any] = []
    larc.register_step_post_hook(lambda *_: steps.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(larc, step_size=1, gamma=0.5)

    def closure() -> torch.Tensor:
        larc.zero_grad()
        loss = sum((param**2).sum() for param in params)
        loss.backward()
        return loss

    first = larc.step(closure)
    scheduler.step()
    assert larc.optim.param_groups[0]["lr"] == 0.05
    assert larc.step(closure) < first
    assert steps == [1, 1]
    larc.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(larc.optim.param_groups) == 3
    for twin in (copy.deepcopy(larc), pickle.loads(pickle.dumps(larc))):
        torch.testing.assert_close(twin.state_dict(), larc.state_dict(), rtol=0, atol=0)
        twin.step()
    assert steps == [1, 1]
    _, other = larc_of(True, momentum=0.9)
    other.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    other.load_state_dict(larc.state_dict())
    torch.testing.assert_close(other.state_dict(), larc.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_larc_trains_with_levels(level: str) -> None:
    net: Any = model_of(0)
    larc: Any = parallel.LARC(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-3), 0.1)
    options = {"opt_level": level, "dtype": torch.bfloat16, "device_type": "cpu", "loss_scale": "dynamic"}
    net, larc = autoamp.initialize(net, larc, verbosity=0, **options)
    losses = []
    for _ in range(20):
        larc.zero_grad()
        loss = (net(batch()).float() - 1.0).square().mean()
        with autoamp.scale_loss(loss, larc) as scaled:
            scaled.backward()
        larc.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_multiproc(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "pathlib.Path(__file__).with_name('rank' + os.environ['RANK']).write_text(' '.join(sys.argv[1:]))\n"
        "sys.exit(3 * int(os.environ['RANK']))\n"
    )
    assert multiproc.main([str(script), "--world-size", "2", "x"]) == 3
    assert (tmp_path / "rank1").read_text() == "--world-size 2 x --rank 1"


@pytest.mark.parametrize("given", [["--world-size=2"], ["--world-size", "2"]])
def test_multiproc_takes_the_number_of_processes_in_both_spellings(given: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; sys.exit(int(os.environ['WORLD_SIZE']) + 10 * len(sys.argv))\n")
    assert multiproc.main([str(script), *given]) == 2 + 10 * (1 + len(given) + 2)


@pytest.mark.parametrize("given", [["--world-size"], ["--world-size", "many"], ["--world-size=0"], ["--world-size=-1"]])
def test_multiproc_says_what_is_no_number_of_processes(given: list[str]) -> None:
    with pytest.raises(UsageError, match=r"--world-size must be a whole number of 1 or more, not"):
        multiproc.main(["script.py", *given])
