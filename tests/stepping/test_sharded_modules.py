"""What `fully_shard` does to optimizers made before it. One process is a mesh too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import autoamp
from tests.stepping.networks import loss_of, network, sgd

OPTIONS: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16, "verbosity": 0, "loss_scale": "dynamic"}


pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_made_before_sharding_warns(level: Any) -> None:
    model = network()
    optimizer = sgd(model.parameters())
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
