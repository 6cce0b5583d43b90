"""Torch's wrappers under opt levels, on four processes over gloo, beside plain torch and one process on all samples.

The third of five steps overflows on one rank alone.
"""

# No `annotations` from __future__: DistributedDataParallel wants types themselves in a hook's signature.
import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.integration.spawned import on_ranks

pytestmark = pytest.mark.processes

RANKS = 4
STEPS = 5
BAD_STEP, BAD_RANK = 2, 2
SCALE = 2.0**10
INF = float("inf")
HALF = torch.float16


class Net(nn.Module):
    """Weights that fp16 holds exactly, so that masters begin alike whether they are made from them or from halves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.unused = nn.Linear(2, 2)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(param.half().float())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.norm(torch.tanh(self.first(x))))
        return found


class Used(Net):
    """The same with no parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused


def samples(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return torch.randn(RANKS * 4, 8, generator=generator), torch.randn(RANKS * 4, 4, generator=generator)


def part(step: int) -> tuple[Tensor, Tensor]:
    x, y = samples(step)
    return x.chunk(RANKS)[dist.get_rank()], y.chunk(RANKS)[dist.get_rank()]


def whole(tensor: Any) -> Tensor:
    found: Tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().float().clone()
    return found


@contextlib.contextmanager
def amp(level: str, model: nn.Module, optimizer: Any = None) -> Iterator[None]:
    """Set up what a level means here: ``torch`` is without autoamp, ``fp32`` scales and casts nothing."""
    scaler = autoamp.DynamicLossScaler(SCALE)
    options: dict[str, Any] = {"device_type": "cpu", "dtype": HALF, "verbosity": 0, "loss_scale": scaler}
    if level == "fp32":
        options["lists"] = {"extends": []}
    if level != "torch":
        autoamp.initialize(model, optimizer, opt_level="O1" if level == "fp32" else level, **options)
    try:
        yield
    finally:
        if (handle := autoamp.current_handle()) is not None:
            handle.deactivate()


def train(
    model: Any, optimizer: Any, batch: Callable[[int], tuple[Tensor, Tensor]], accumulates: str = ""
) -> dict[str, Any]:
    """Take the steps; returns what each has left: the loss, true gradients and values by parameter."""
    handle, left = autoamp.current_handle(), []
    module = model.module if isinstance(model, DistributedDataParallel) else model

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        if hasattr(model, "no_sync"):
            with model.no_sync():
                yield
        else:
            model.set_requires_gradient_sync(accumulates != "no_sync")
            yield
            model.set_requires_gradient_sync(True)

    def backward(x: Tensor, y: Tensor, factor: float) -> float:
        loss = (model(x).float() - y).square().mean() * factor
        with contextlib.nullcontext(loss) if handle is None else autoamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return float(loss.detach())

    for step in range(STEPS):
        bad = step == BAD_STEP and (not dist.is_initialized() or dist.get_rank() == BAD_RANK)
        optimizer.zero_grad()
        x, y = batch(step)
        if accumulates:
            with no_sync():
                loss = backward(x[:2], y[:2], (INF if bad else 1.0) / 2)
            loss += backward(x[2:], y[2:], 0.5)
        else:
            loss = backward(x, y, INF if bad else 1.0)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [None if param.grad is None else whole(param.grad) for param in params]
        if handle is not None or step != BAD_STEP:
            # Plain torch would step with inf.
            optimizer.step()
        left.append({"loss": loss, "grads": grads, "values": [whole(param) for param in params]})
    dtypes = sorted({str(param.dtype) for param in module.parameters()})
    told = None if handle is None else (handle.skipped_steps, handle.loss_scale)
    return {"left": left, "told": told, "dtypes": dtypes}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# -- wrappers, each as a program with a level --


def ddp(level: str, model: nn.Module | None = None, hook: Any = None, accumulates: str = "", **settings: Any) -> Any:
    model = model or Used()
    optimizer = sgd(model)
    with amp(level, model, optimizer):
        wrapped = DistributedDataParallel(model, **settings)
        if hook is not None:
            wrapped.register_comm_hook(*hook())
        return train(wrapped, optimizer, part, accumulates)


def bf16_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Do what torch's own hook does, which asks for NCCL."""
    group = dist.group.WORLD
    half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size(group))
    done = dist.all_reduce(half, group=group, async_op=True).get_future()
    return done.then(lambda future: bucket.buffer().copy_(future.value()[0]))


def fsdp(level: str, mesh: Any = None, accumulates: str = "", **policy: Any) -> Any:
    """The order that goes at all levels: initialize, fully_shard, the optimizer."""
    model = Used()
    with amp(level, model):
        for module in (model.first, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
        return train(model, sgd(model), part, accumulates)


def fsdp_first(level: str) -> Any:
    model = Used()
    fully_shard(model)
    optimizer = sgd(model)
    with amp(level, model, optimizer):
        return train(model, optimizer, part)


def hsdp(level: str) -> Any:
    return fsdp(level, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


def plan_of_layers() -> Any:
    return {"first": ColwiseParallel(output_layouts=Replicate()), "last": RowwiseParallel(input_layouts=Replicate())}


def tensor_parallel(level: str, first: bool = False) -> Any:
    """All ranks have all samples."""
    model = Used()
    plan = plan_of_layers()
    mesh = init_device_mesh("cpu", (RANKS,))
    if first:
        parallelize_module(model, mesh, plan)
        optimizer = sgd(model)
        with amp(level, model, optimizer):
            return train(model, optimizer, samples)
    with amp(level, model):
        parallelize_module(model, mesh, plan)
        return train(model, sgd(model), samples)


def fsdp_of_tensor_parallel(level: str) -> Any:
    """Two dimensions: each half of the ranks has half of the samples."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Used()
    plan = plan_of_layers()
    with amp(level, model):
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
        place = mesh.get_local_rank("data")
        return train(model, sgd(model), lambda step: tuple(one.chunk(2)[place] for one in samples(step)))  # type: ignore[arg-type,return-value]


def pipeline(level: str) -> Any:
    """A layer on each rank; that of one rank alone overflows, in its own parameters."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Linear(8, 8)
    optimizer = sgd(stage)
    with amp(level, stage, optimizer):
        handle: Any = autoamp.current_handle()
        handle.sync_over(dist.group.WORLD, replicas=1)
        factor = 1.0
        stage.weight.register_hook(lambda grad: grad * factor)
        told = []
        for step in range(STEPS):
            factor = INF if step == BAD_STEP and rank == BAD_RANK else 1.0
            before = whole(optimizer.param_groups[0]["params"][0])
            optimizer.zero_grad()
            x, came = samples(step)[0][:4], torch.zeros(4, 8)
            if rank:
                dist.recv(x, rank - 1)
                x.requires_grad_()
            out = stage(x).float()
            if rank < RANKS - 1:
                dist.send(out.detach(), rank + 1)
                dist.recv(came, rank + 1)
            loss = out.square().mean() if rank == RANKS - 1 else torch.zeros(())
            with handle.scale_loss(loss, optimizer) as scaled:
                if rank == RANKS - 1:
                    scaled.backward()
                else:
                    out.backward(came)
            if rank:
                dist.send(x.grad, rank - 1)
            optimizer.step()
            told.append((torch.equal(before, whole(optimizer.param_groups[0]["params"][0])), handle.loss_scale))
        return told


DDPS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "no_sync": {"accumulates": "no_sync"},
    "static_graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused": {"model": Net, "find_unused_parameters": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
    "fp16 hook": {"hook": lambda: (None, default_hooks.fp16_compress_hook)},
    "bf16 hook": {"hook": lambda: (None, bf16_hook)},
}


def ddp_of(name: str) -> Callable[[str], Any]:
    settings = dict(DDPS[name])
    model = settings.pop("model", Used)
    return lambda level: ddp(level, model(), **settings)


WRAPPERS: dict[str, Callable[[str], Any]] = {
    **{name: ddp_of(name) for name in DDPS},
    "fully_shard": fsdp,
    "fully_shard, two passes": lambda level: fsdp(level, accumulates="passes"),
    "fully_shard, no_sync": lambda level: fsdp(level, accumulates="no_sync"),
    "HSDP": hsdp,
    "tensor parallel": tensor_parallel,
    "2-D": fsdp_of_tensor_parallel,
}
ORDERS: dict[str, Callable[[str], Any]] = {
    "fully_shard first": fsdp_first,
    "tensor parallel first": lambda level: tensor_parallel(level, first=True),
}
POLICIES: dict[str, dict[str, Any]] = {
    "fp16": {"param_dtype": HALF},
    "fp16, fp32 reduced": {"param_dtype": HALF, "reduce_dtype": torch.float32},
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16 reduced": {"reduce_dtype": torch.bfloat16},
}


def attempt(program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return program(*args, **kwargs)
    except autoamp.UsageError as error:
        return str(error)
    except Exception:
        return "unexpected: " + traceback.format_exc()


def found_by_rank() -> dict[Any, Any]:
    warnings.simplefilter("ignore")
    found: dict[Any, Any] = {}
    for name, program in WRAPPERS.items():
        for level in ("torch", "fp32", "O1", "O2"):
            found[name, level] = attempt(program, level)
    for name, program in ORDERS.items():
        for level in ("O1", "O2"):
            found[name, level] = attempt(program, level)
    for name, policy in POLICIES.items():
        for level in ("fp32", "O2"):
            found["policy " + name, level] = attempt(fsdp, level, **policy)
    for level in ("O1", "O2"):
        found["pipeline", level] = attempt(pipeline, level)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of four processes found."""
    return on_ranks(tmp_path_factory, RANKS, found_by_rank)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process does with all samples, by level."""
    found = {}
    for level in ("torch", "fp32", "O1", "O2"):
        model = Used()
        optimizer = sgd(model)
        with amp(level, model, optimizer):
            found[level] = train(model, optimizer, samples)
    return found


def assert_like(left: dict[str, Any], other: dict[str, Any], tolerance: float, *kinds: str) -> None:
    """Compare parameter by parameter, against the largest element; exactly where the tolerance is 0."""
    for kind in kinds:
        # A parameter that is not used has no gradient.
        for one, two in zip(left[kind][:6], other[kind][:6], strict=True):
            if tolerance:
                assert float((one - two).abs().max()) <= tolerance * float(two.abs().max())
            else:
                assert torch.equal(one, two)


GOOD = [step for step in range(STEPS) if step != BAD_STEP]
PROGRAMS = [
    *((name, level) for name in WRAPPERS for level in ("fp32", "O1", "O2")),
    *((name, "O1") for name in ORDERS),
    *(("policy " + name, level) for name in POLICIES for level in ("fp32", "O2")),
]


@pytest.mark.parametrize(("name", "level"), PROGRAMS)
def test_the_overflow_of_one_rank_skips_the_step_of_all(ranks: list[Any], name: str, level: str) -> None:
    runs = [found[name, level] for found in ranks]
    assert [type(run) for run in runs] == [dict] * RANKS, runs
    for run in runs:
        assert run["told"] == (1, SCALE / 2)
        assert set(run["dtypes"]) == {"torch.float16" if level == "O2" else "torch.float32"}
        values = [left["values"] for left in run["left"]]
        assert all(map(torch.equal, values[BAD_STEP], values[BAD_STEP - 1]))
        for step in GOOD:
            assert_like(run["left"][step], runs[0]["left"][step], 0.0, "grads", "values")
    for before, after in zip(runs[0]["left"], runs[0]["left"][1:], strict=False):
        assert after is runs[0]["left"][BAD_STEP] or not torch.equal(before["values"][0], after["values"][0])


# These round what they reduce: not alike for gradients that are scaled and such that are not.
ROUNDING = {"fp16 hook": 1e-3, "bf16 hook": 0.0}


@pytest.mark.parametrize("name", WRAPPERS)
def test_in_fp32_gradients_and_steps_are_those_of_plain_torch(ranks: list[Any], name: str) -> None:
    for found in ranks:
        for step in GOOD:
            plain, own = (found[name, level]["left"][step] for level in ("torch", "fp32"))
            assert_like(own, plain, ROUNDING.get(name, 0.0), "grads", "values")
            assert own["loss"] == plain["loss"] or name in ROUNDING


@pytest.mark.parametrize(("name", "level"), PROGRAMS)
def test_gradients_and_losses_are_those_of_one_process(
    ranks: list[Any], alone: dict[str, Any], name: str, level: str
) -> None:
    halved = level != "fp32" or "policy" in name
    bfloat = "bf16" in name
    tolerance = 0.03 if bfloat else 4e-3 if halved or "hook" in name else 2e-6
    for step in GOOD:
        reference, lefts = alone[level]["left"][step], [found[name, level]["left"][step] for found in ranks]
        loss = sum(left["loss"] for left in lefts) / RANKS
        assert loss == pytest.approx(reference["loss"], rel=tolerance)
        assert_like(lefts[0], reference, tolerance, "grads", "values")


def test_a_model_that_is_cast_is_initialized_before_it_is_distributed(ranks: list[Any]) -> None:
    for found in ranks:
        for name in ORDERS:
            assert "call initialize(model) first, then fully_shard or parallelize_module" in found[name, "O2"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_stage_that_overflowed_stops_the_steps_of_the_others(ranks: list[Any], level: str) -> None:
    for found in ranks:
        assert [same for same, _ in found["pipeline", level]] == [step == BAD_STEP for step in range(STEPS)]
        assert [scale for _, scale in found["pipeline", level]] == [SCALE] * BAD_STEP + [SCALE / 2] * (STEPS - BAD_STEP)
