"""Wrappers of torch: DistributedDataParallel is seen, what its next backward pass does, and what sharding does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel

import autoamp
from autoamp.core.ranks import Sync, kept_equal, living_wrappers, next_sync, watch_wrappers
from tests.core.stepping.networks import loss_of, network, sgd


@pytest.fixture(autouse=True)
def no_wrapper_is_left(one_process: None, collected: Any) -> None:
    """Collect the wrappers of other tests, which lie in cycles."""
    collected()


class Watcher:
    pass


def hooks() -> int:
    return len(torch_module._global_module_registration_hooks)


def test_wrappers_made_before_and_after_are_seen(collected: Any) -> None:
    earlier = DistributedDataParallel(nn.Linear(2, 2))
    watcher, before = Watcher(), hooks()
    found, _ = watch_wrappers(watcher)
    later = DistributedDataParallel(nn.Linear(2, 2))
    nn.Sequential(later)
    assert [reference() for reference in found] == [earlier, later]
    assert set(living_wrappers()) == {earlier, later}
    assert hooks() == before + 1
    del watcher
    assert hooks() == before


def test_parameters_that_are_kept_equal() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.weight"])
    wrapper = DistributedDataParallel(net)
    assert [id(p) for p in kept_equal(wrapper)] == [id(p) for p in (net[0].weight, net[0].bias, net[1].bias)]


def test_whether_the_next_backward_pass_of_ddp_reduces_gradients() -> None:
    wrapper, given = DistributedDataParallel(nn.Linear(2, 2)), torch.ones(1, 2)
    wrapper(given)
    assert next_sync(wrapper) is Sync.YES
    with wrapper.no_sync():
        wrapper(given)
        assert next_sync(wrapper) is Sync.NO
    # The forward pass was within no_sync(), the backward pass will not be: torch does not reduce it.
    assert next_sync(wrapper) is Sync.UNSURE
    with torch.no_grad():
        wrapper(given)
    assert next_sync(wrapper) is Sync.UNSURE
    wrapper(given)
    assert next_sync(wrapper) is Sync.YES


# -- models that torch shards. One process is a mesh too --


OPTIONS: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16, "verbosity": 0, "loss_scale": "dynamic"}


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
