"""Which ranks agree on a step, what they exchange, and parts of DTensors. Spawned: integration/test_agreement.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autoamp.core import is_flat, is_sharded, local_of, ranks
from autoamp.core.ranks import RequestedGroup, SyncGroup
from autoamp.errors import UsageError


def group_of(params: Sequence[nn.Parameter], asked: RequestedGroup | None = None) -> SyncGroup | None:
    return ranks.sync_group(params, ranks.meshes_of(params), asked)


def test_plain_parameters_need_no_agreement() -> None:
    assert group_of([nn.Parameter(torch.ones(1))]) is None
    with pytest.raises(UsageError, match="no process group yet"):
        RequestedGroup.from_arguments(None, None)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("norm", "count"), [(2.0**24 + 1, 1), (7.0, 3), (math.inf, 3), (math.nan, 1)])
def test_each_scaler_gets_what_its_own_checks_found(norm: float, count: int) -> None:
    group = SyncGroup(dist.group.WORLD, torch.device("cpu"), 1)
    found = [[torch.tensor([float(place == count - 1)]), torch.zeros(1)] for place in range(count)]
    told = ranks.reduce_found_inf(group, found, [], has_checks=True, norm=torch.tensor(norm, dtype=torch.float64))
    assert [bool(flag) for flag in told.of_scalers] == [False] * (count - 1) + [True]
    # A norm of inf or nan says nothing of the rest.
    assert float(told.norm) == pytest.approx(norm, rel=0, abs=0, nan_ok=True)
    assert (bool(told.now), bool(told.has_checks), bool(told.loss_is_nonfinite)) == (True, True, False)
    silent = ranks.reduce_found_inf(group, [[]] * count, [torch.zeros(1)], has_checks=False, loss_is_nonfinite=True)
    assert (bool(silent.now), bool(silent.has_checks), bool(silent.loss_is_nonfinite)) == (False, False, True)
    assert [bool(flag) for flag in silent.of_scalers] == [False] * count
    assert float(silent.norm) == 0.0


def tensors_on(mesh: Any, dims: Sequence[str]) -> list[nn.Parameter]:
    """Return a parameter for each text: sharded over the dimensions that it names, plain for none, "=" not sharded."""
    params = []
    for names in dims:
        value: Any = torch.ones(2)
        if names:
            part = mesh[tuple(names.strip("="))]
            placement = Replicate() if "=" in names else Shard(0)
            value = DTensor.from_local(value, part, [placement] * part.ndim, run_check=False)
        params.append(nn.Parameter(value))
    return params


@pytest.mark.parametrize(
    ("dims", "requested", "ranks", "copies"),
    [
        # The ranks of one mesh, and of the widest of several within one another.
        (["abc"], None, range(8), [1]), (["a"], None, [0, 4], [1]), (["b"], None, [0, 2], [1]),
        (["ab", "a"], None, [0, 2, 4, 6], [1, 2]), (["=ab"], None, [0, 2, 4, 6], [4]),
        # The product of orthogonal meshes, where that is all ranks.
        (["ab", "c"], None, range(8), [2, 4]), (["a", "b", "c"], None, range(8), [4, 4, 4]),
        (["a", "b"], None, r"orthogonal meshes, of the ranks \[0, 2\] and \[0, 4\]; call handle.sync_over", []),
        # What the program asked for, its ranks and how many of them are replicas.
        (["a", ""], (range(8), None), range(8), [4, 8]), (["a", ""], (range(8), 2), range(8), [1, 2]),
        (["ab", ""], ([0, 4], 2), [0, 2, 4, 6], [1, 4]), (["ab", ""], ([0, 4], 1), [0, 2, 4, 6], [1, 2]),
        (["a", ""], ([0, 4], 1), [0, 4], [1, 1]), ([""], ([0, 1], 2), [0, 1], [2]),
        (["a"], ([0, 1], 1), r"got the ranks \[0, 1\], and parameters are on meshes of the ranks \[0, 4\]", []),
    ],
)  # fmt: skip
def test_the_ranks_that_agree_on_a_step(
    dims: list[str], requested: Any, ranks: Any, copies: list[int], fake_ranks: Callable[[int], None]
) -> None:
    fake_ranks(8)
    params = tensors_on(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c")), dims)
    asked = None
    if requested is not None:
        named = list(requested[0])
        asked = RequestedGroup.from_arguments(
            dist.group.WORLD if len(named) == 8 else dist.new_group(named), requested[1]
        )
    if isinstance(ranks, str):
        with pytest.raises(UsageError, match=ranks):
            group_of(params, asked)
        return
    group = group_of(params, asked)
    assert group is not None
    assert sorted(dist.get_process_group_ranks(group.group)) == list(ranks)
    assert (group.device, [group.copies_of(param) for param in params]) == (torch.device("cpu"), copies)
    # A process group that is there is taken.
    again = group_of(params, asked)
    assert again is not None
    assert again.group is group.group


def test_groups_that_were_made_are_kept_as_long_as_the_default_group(fake_ranks: Callable[[int], None]) -> None:
    fake_ranks(8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    made: list[Any] = [group_of(tensors_on(mesh, [dims])) for dims in ("ab", "bc", "ab", "bc")]
    assert [one.group for one in made[2:]] == [one.group for one in made[:2]]
    assert made[0].group is not made[1].group
    dist.destroy_process_group()
    fake_ranks(8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    again: Any = group_of(tensors_on(mesh, ["ab"]))
    assert again.group is not made[0].group


@pytest.mark.parametrize("replicas", [0, -1, True, 1.0, 3])
def test_wrong_replicas_are_named(replicas: Any, fake_ranks: Callable[[int], None]) -> None:
    fake_ranks(4)
    assert [RequestedGroup.from_arguments(dist.group.WORLD, count).replicas for count in (None, 1, 2, 4)] == [
        4,
        1,
        2,
        4,
    ]
    with pytest.raises(UsageError, match=f"replicas={replicas!r} does not divide the 4 ranks"):
        RequestedGroup.from_arguments(dist.group.WORLD, replicas)
    with pytest.raises(UsageError, match="group='world' is not a process group of this rank"):
        RequestedGroup.from_arguments("world", None)


def with_gradients() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    params[0].grad, params[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    return params


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 25.0), (1.0, 7.0), (math.inf, 4.0)])
def test_the_norm_before_its_root_is_taken(norm_type: float, expected: float) -> None:
    assert float(ranks.powered_norm(with_gradients(), None, norm_type)) == pytest.approx(expected)
    assert float(ranks.powered_norm(with_gradients()[2:], None, norm_type)) == 0.0


@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"),
    [(5.0, 1.0, 0.2), (0.5, 1.0, 1.0), (math.inf, 1.0, 0.0), (math.nan, 1.0, 1.0), (math.inf, math.inf, 1.0)],
)
def test_clipping_multiplies_where_the_norm_is_too_high(norm: float, max_norm: float, factor: float) -> None:
    params = with_gradients()
    ranks.clip_([*params, params[0]], torch.tensor(norm), max_norm)
    assert [param.grad.sum().item() for param in params[:2] if param.grad is not None] == pytest.approx(
        [3.0 * factor, 4.0 * factor], rel=1e-5
    )


# -- DTensors and flat parameters, on one rank --


def shard(placement: Any, value: torch.Tensor) -> Any:
    return DTensor.from_local(value, init_device_mesh("cpu", (1,)), [placement], run_check=False)


def test_a_plain_parameter_is_no_shard() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not is_sharded(parameter)
    assert not is_flat(parameter)
    assert local_of(parameter) is parameter
    assert ranks.meshes_of([parameter]) == []


@pytest.mark.usefixtures("one_process")
def test_a_distributed_tensor_is_worked_on_by_its_part() -> None:
    value = torch.ones(2)
    whole = shard(Replicate(), value)
    assert is_sharded(whole)
    assert type(local_of(whole)) is torch.Tensor
    local_of(whole).mul_(2.0)
    assert torch.equal(value, torch.full((2,), 2.0))
    assert ranks.meshes_of([value, whole, whole]) == [whole.device_mesh]
    assert SyncGroup(None, torch.device("cpu"), 1).copies_of(whole) == 1


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_addends_become_a_sum(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(shard(Replicate(), torch.ones(2, dtype=dtype)))
    parameter.grad = shard(Partial(), torch.ones(2, dtype=dtype))
    ranks.reduce_partial([nn.Parameter(torch.ones(1)), parameter], halves_alone=True)
    gradient: Any = parameter.grad
    assert gradient.placements[0].is_partial() is (dtype is torch.float32)
    ranks.reduce_partial([parameter], halves_alone=False)
    gradient = parameter.grad
    assert gradient.placements == (Replicate(),)
