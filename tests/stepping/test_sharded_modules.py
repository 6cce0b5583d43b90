"""What `fully_shard` does to optimizers made before it. One process is a mesh too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import autoamp
from autoamp.fp16_utils import FP16_Optimizer

OPTIONS: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16, "verbosity": 0, "loss_scale": "dynamic"}
ORDER = "Make the optimizer afterwards"
UNSCALED = "param_dtype=torch.float16, and SGD steps by gradients of a loss that was not scaled"


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_handle_stays() -> Iterator[None]:
    yield
    if (handle := autoamp.current_handle()) is not None:
        handle.deactivate()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def shard(model: nn.Module, part: nn.Module | None = None, **policy: Any) -> nn.Module:
    fully_shard(part or model, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(**policy))
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 4)).float().square().mean()


def block_and_step(model: nn.Module, optimizer: Any) -> None:
    with autoamp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a part of it"])
def test_an_optimizer_from_before_is_refused(level: Any, whole: bool) -> None:
    model = network()
    optimizer = sgd(model)
    autoamp.initialize(model, optimizer, opt_level=level, **OPTIONS)
    shard(model, None if whole else model[0])
    before = [param.detach().clone() for param in model[2].parameters()]
    with pytest.raises(autoamp.UsageError, match=f"parameters of SGD, the first of shape .4, 4..*{ORDER}"):
        block_and_step(model, optimizer)
    if not whole:
        # Refused before anything was stepped.
        assert all(map(torch.equal, model[2].parameters(), before))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_from_before_tensor_parallelism_is_refused(level: Any) -> None:
    model = network()
    optimizer = sgd(model)
    autoamp.initialize(model, optimizer, opt_level=level, **OPTIONS)
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    with pytest.raises(autoamp.UsageError, match=f"2 parameters of SGD, the first of shape .4, 4..*{ORDER}"):
        block_and_step(model, optimizer)


def test_a_model_that_is_parallel_already_is_not_cast() -> None:
    model = network()
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    with pytest.raises(autoamp.UsageError, match=r"parallelize_module has sharded .0. already"):
        autoamp.initialize(model, opt_level="O2", **OPTIONS)
    assert autoamp.initialize(model, opt_level="O1", **OPTIONS) is model


def test_an_optimizer_from_before_is_refused_under_auto_scale() -> None:
    model = network()
    optimizer = sgd(model)
    shard(model)
    autoamp.init(dtype=torch.float16, device_type="cpu").auto_scale()
    loss_of(model).backward()
    with pytest.raises(autoamp.UsageError, match=ORDER):
        optimizer.step()


def test_an_optimizer_from_before_is_refused_by_fp16_optimizer() -> None:
    model = network().half()
    optimizer = FP16_Optimizer(sgd(model), static_loss_scale=8.0, verbose=False)
    shard(model)
    with pytest.raises(autoamp.UsageError, match=ORDER):
        optimizer.backward(model(torch.ones(3, 4).half()).float().square().mean())


def test_other_parameters_without_gradients_are_not_meant() -> None:
    model, other, own = network(), nn.Linear(4, 4), nn.Parameter(torch.ones(7))
    shard(model)
    unused = [other.weight, own, nn.Parameter(torch.ones(2, 4), requires_grad=False)]
    optimizer = torch.optim.SGD([*model.parameters(), *unused], lr=0.1)
    autoamp.init(dtype=torch.float16, device_type="cpu")
    block_and_step(model, optimizer)
    assert optimizer.param_groups[0]["params"][0].grad is not None
