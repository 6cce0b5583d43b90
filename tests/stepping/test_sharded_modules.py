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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import autoamp

OPTIONS: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16, "verbosity": 0, "loss_scale": "dynamic"}


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


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 4)).float().square().mean()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_from_before_is_told_of(level: Any) -> None:
    model = network()
    optimizer = sgd(model)
    autoamp.initialize(model, optimizer, opt_level=level, **OPTIONS)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with (
        pytest.warns(UserWarning, match="no parameter of SGD has a gradient.*before the model was replaced or sharded"),
        autoamp.scale_loss(loss_of(model), optimizer) as scaled,
    ):
        scaled.backward()


def test_a_model_that_is_parallel_already_is_not_cast() -> None:
    model = network()
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    with pytest.raises(autoamp.UsageError, match=r"parallelize_module has sharded .0. already"):
        autoamp.initialize(model, opt_level="O2", **OPTIONS)
    assert autoamp.initialize(model, opt_level="O1", **OPTIONS) is model
