"""Torch's wrappers at opt levels and under automatic scaling, on four processes over gloo.

They are compared with plain torch, and with one process on all samples.

The third of five steps overflows on one rank alone.
"""

# No `annotations` from __future__: DistributedDataParallel wants types themselves in a hook's signature.
import contextlib
import functools
import itertools
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
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


Scaled = Callable[[Tensor, Any], contextlib.AbstractContextManager[Tensor]]
LEVELS = ("fp32", "auto", "O1", "O2")


@contextlib.contextmanager
def amp(level: str, model: nn.Module, optimizer: Any = None) -> Iterator[Scaled]:
    """Set up what a level means here, and give what scales a loss.

    ``torch`` is without autoamp, ``fp32`` scales and casts nothing, ``auto`` does so by `Handle.auto_scale`.
    """
    options: dict[str, Any] = {"device_type": "cpu", "dtype": HALF, "loss_scale": autoamp.DynamicLossScaler(SCALE)}
    if level in ("fp32", "auto"):
        options["lists"] = {"extends": []}
    if level == "auto":
        autoamp.init(**options).auto_scale()
    elif level != "torch":
        autoamp.initialize(model, optimizer, opt_level="O1" if level == "fp32" else level, verbosity=0, **options)
    try:
        yield autoamp.scale_loss if level in ("fp32", "O1", "O2") else lambda loss, _: contextlib.nullcontext(loss)
    finally:
        if (handle := autoamp.current_handle()) is not None:
            handle.deactivate()


def nothing(model: Any) -> None:
    """Leave gradients as they are."""


def train(
    model: Any,
    optimizer: Any,
    batch: Callable[[int], tuple[Tensor, Tensor]],
    scaled_loss: Scaled,
    accumulates: str = "",
    between: Callable[[Any], None] = nothing,
) -> dict[str, Any]:
    """Take the steps; returns what each has left: the loss, true gradients and values by parameter.

    ``between`` is what the program does to gradients after the backward pass.
    """
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
        with scaled_loss(loss, optimizer) as scaled:
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
        between(model)
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


@functools.cache
def device_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh of ranks, which all programs share: each of its groups has several threads as long as it lives."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def run(
    level: str,
    wrap: Callable[[Any], Any] = lambda model: model,
    *,
    kind: type[nn.Module] = Used,
    early: bool = True,
    first: bool = False,
    batch: Callable[[int], tuple[Tensor, Tensor]] = part,
    **of_training: Any,
) -> Any:
    """Initialize a model, wrap it, and train it; the optimizer is made before both if it comes early.

    Where ``first`` is true the model is wrapped before all else. Sharding replaces parameters, so that the optimizer
    comes last.
    """
    model: Any = wrap(kind()) if first else kind()
    optimizer = sgd(model) if early else None
    with amp(level, model, optimizer) as scaled_loss:
        model = model if first else wrap(model)
        return train(model, optimizer or sgd(model), batch, scaled_loss, **of_training)


def ddp(hook: Any = None, hides: bool = False, **settings: Any) -> Callable[[Any], Any]:
    """Return what wraps a model in torch's `DistributedDataParallel`."""

    def wrap(model: nn.Module) -> Any:
        for param in model.parameters() if hides else ():
            param.register_hook(lambda gradient: gradient.nan_to_num(0.0, 1.0, -1.0))
        wrapped = DistributedDataParallel(model, **settings)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        return wrapped

    return wrap


def bf16_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Do what torch's own hook does, which asks for NCCL."""
    group = dist.group.WORLD
    half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size(group))
    done = dist.all_reduce(half, group=group, async_op=True).get_future()
    return done.then(lambda future: bucket.buffer().copy_(future.value()[0]))


def clip(model: nn.Module) -> None:
    """Write to gradients that were reduced."""
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def average(model: nn.Module) -> None:
    """Reduce by hand what no wrapper has reduced."""
    for param in model.parameters():
        if param.grad is not None and not isinstance(param, DTensor):
            dist.all_reduce(param.grad)
            param.grad.div_(RANKS)


def average_by_messages(model: nn.Module) -> None:
    """Reduce without a collective, and past the count of writes."""
    for distance in (1, 2):
        other = dist.get_rank() ^ distance
        for param in model.parameters():
            assert param.grad is not None
            received = torch.empty_like(param.grad)
            for work in (dist.isend(param.grad, other), dist.irecv(received, other)):
                work.wait()  # type: ignore[union-attr]
            param.grad.data.add_(received).div_(2)


def sharded(mesh: Any = None, part_alone: bool = False, **policy: Any) -> Callable[[Any], Any]:
    """Return what shards a model, or its first layer alone."""

    def wrap(model: Any) -> Any:
        for module in (model.first,) if part_alone else (model.first, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
        return model

    return wrap


def flat_shards() -> list[str]:
    """Return what `FullyShardedDataParallel` is refused with: of a part, or of all, in both of its ways."""
    messages = []
    for keeps_originals, of_a_part in itertools.product((False, True), repeat=2):
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        with amp("auto", model):
            settings: Any = {"use_orig_params": keeps_originals, "device_id": torch.device("cpu")}
            wrapped: nn.Module = FullyShardedDataParallel(model[0] if of_a_part else model, **settings)
            wrapped = nn.Sequential(wrapped, model[1]) if of_a_part else wrapped
            _optimizer = sgd(wrapped)
            with pytest.raises(autoamp.UsageError) as caught:
                wrapped(part(0)[0]).sum().backward()
            messages.append(str(caught.value))
    return messages


def tensor_parallel(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Split the layers over ranks, each of which has all samples."""
    plan: Any = {
        "first": ColwiseParallel(output_layouts=Replicate()), "last": RowwiseParallel(input_layouts=Replicate())
    }  # fmt: skip
    return parallelize_module(model, mesh or device_mesh((RANKS,)), plan)


def hsdp(level: str) -> Any:
    mesh = device_mesh((2, 2), ("replicas", "shards"))
    return run(level, sharded(mesh), early=False)


def fsdp_of_tensor_parallel(level: str) -> Any:
    """Two dimensions: each half of the ranks has half of the samples."""
    mesh = device_mesh((2, 2), ("data", "tensor"))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = (whole.chunk(2)[mesh.get_local_rank("data")] for whole in samples(step))
        return x, y

    def wrap(model: nn.Module) -> Any:
        return fully_shard(tensor_parallel(model, mesh["tensor"]), mesh=mesh["data"])

    return run(level, wrap, early=False, batch=batch)


# What wraps, and how the program goes on.
PROGRAMS_OF: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "ddp": (ddp(), {}),
    "no_sync": (ddp(), {"accumulates": "no_sync"}),
    "static_graph": (ddp(static_graph=True), {}),
    "bucket views": (ddp(gradient_as_bucket_view=True), {}),
    "unused": (ddp(find_unused_parameters=True), {"kind": Net}),
    "small buckets": (ddp(bucket_cap_mb=1e-4), {}),
    "fp16 hook": (ddp(default_hooks.fp16_compress_hook), {}),
    "bf16 hook": (ddp(bf16_hook), {}),
    "clipped": (ddp(), {"between": clip}),
    "fully_shard": (sharded(), {"early": False}),
    "fully_shard, two passes": (sharded(), {"early": False, "accumulates": "passes"}),
    "fully_shard, no_sync": (sharded(), {"early": False, "accumulates": "no_sync"}),
    "tensor parallel": (tensor_parallel, {"early": False, "batch": samples}),
    "a part sharded": (sharded(part_alone=True), {"early": False, "between": average}),
    "by hand": (lambda model: model, {"between": average}),
    "by messages": (lambda model: model, {"between": average_by_messages}),
}
WRAPPERS: dict[str, Callable[[str], Any]] = {
    **{name: functools.partial(run, wrap=wrap, **how) for name, (wrap, how) in PROGRAMS_OF.items()},
    "HSDP": hsdp,
    "2-D": fsdp_of_tensor_parallel,
}
ORDERS: dict[str, Callable[[str], Any]] = {
    "fully_shard first": lambda level: run(level, fully_shard, first=True),
    "tensor parallel first": lambda level: run(level, tensor_parallel, first=True, batch=samples),
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
        for level in ("torch", *LEVELS):
            found[name, level] = attempt(program, level)
    found["hidden", "auto"] = attempt(run, "auto", ddp(hides=True))
    for name, program in ORDERS.items():
        for level in ("O1", "O2"):
            found[name, level] = attempt(program, level)
    for name, policy in POLICIES.items():
        for level in ("fp32", "O2"):
            found["policy " + name, level] = attempt(run, level, sharded(**policy), early=False)
    found["flat"] = flat_shards()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of four processes found."""
    return on_ranks(tmp_path_factory, RANKS, found_by_rank)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process does with all samples, by level."""
    found = {level: run(level, batch=samples) for level in ("fp32", "O1", "O2")}
    return {**found, "auto": found["fp32"]}


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
    *((name, level) for name in WRAPPERS for level in LEVELS),
    ("hidden", "auto"),
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


@pytest.mark.parametrize("level", ["fp32", "auto"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_in_fp32_gradients_and_steps_are_those_of_plain_torch(ranks: list[Any], name: str, level: str) -> None:
    for found in ranks:
        for step in GOOD:
            plain, own = (found[name, one]["left"][step] for one in ("torch", level))
            assert_like(own, plain, ROUNDING.get(name, 0.0), "grads", "values")
            assert own["loss"] == plain["loss"] or name in ROUNDING


@pytest.mark.parametrize(("name", "level"), PROGRAMS)
def test_gradients_and_losses_are_those_of_one_process(
    ranks: list[Any], alone: dict[str, Any], name: str, level: str
) -> None:
    halved = level in ("O1", "O2") or "policy" in name
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
            assert "call initialize(model) first, then shard the model" in found[name, "O2"]


def test_flat_parameters_are_refused_with_the_remedy(ranks: list[Any]) -> None:
    for found in ranks:
        assert len(found["flat"]) == 4
        assert all("use bf16, which needs no loss scale" in message for message in found["flat"])
