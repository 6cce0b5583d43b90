"""DTensors and flat parameters, on one rank. With spawned ranks: tests/integration/test_agreement.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from autoamp.scaling.shards import (
    copies_in_mesh,
    is_flat,
    is_sharded,
    local_of,
    meshes_of,
    reduce_partial,
)

pytestmark = pytest.mark.usefixtures("one_process")


def shard(placement: Any, value: torch.Tensor) -> Any:
    return DTensor.from_local(value, init_device_mesh("cpu", (1,)), [placement], run_check=False)


def test_a_plain_parameter_is_no_shard() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not is_sharded(parameter)
    assert not is_flat(parameter)
    assert local_of(parameter) is parameter
    assert meshes_of([parameter]) == []


def test_a_distributed_tensor_is_worked_on_by_its_part() -> None:
    value = torch.ones(2)
    whole = shard(Replicate(), value)
    assert is_sharded(whole)
    assert type(local_of(whole)) is torch.Tensor
    local_of(whole).mul_(2.0)
    assert torch.equal(value, torch.full((2,), 2.0))
    assert meshes_of([value, whole, whole]) == [whole.device_mesh]
    assert copies_in_mesh(whole) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_addends_become_a_sum(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(shard(Replicate(), torch.ones(2, dtype=dtype)))
    parameter.grad = shard(Partial(), torch.ones(2, dtype=dtype))
    reduce_partial([nn.Parameter(torch.ones(1)), parameter], halves_alone=True)
    gradient: Any = parameter.grad
    assert gradient.placements[0].is_partial() is (dtype is torch.float32)
    reduce_partial([parameter], halves_alone=False)
    gradient = parameter.grad
    assert gradient.placements == (Replicate(),)
