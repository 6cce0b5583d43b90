"""Which ranks agree and what they tell one another, on one rank. With spawned ranks: integration/test_agreement.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoamp.errors import UsageError
from autoamp.scaling import FoundInfReduction, RequestedGroup, SyncGroup, SyncGroups, clip_, powered_norm


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_plain_parameters_ask_nobody() -> None:
    assert SyncGroups().among([nn.Parameter(torch.ones(1))], None) is None
    with pytest.raises(UsageError, match="no process group yet"):
        RequestedGroup.of(None, None)


@pytest.mark.usefixtures("one_process")
def test_what_was_asked_for_is_found_and_remembered() -> None:
    asked = RequestedGroup.of(dist.group.WORLD, None)
    assert asked.replicas == 1
    with pytest.raises(UsageError, match="does not divide the 1 ranks"):
        RequestedGroup.of(dist.group.WORLD, 2)
    groups, params = SyncGroups(), [nn.Parameter(torch.ones(1))]
    group = groups.among(params, asked)
    assert group is not None
    assert (group.group, group.copies_of(params[0])) == (dist.group.WORLD, 1)
    assert groups.among(params, asked) is group
    assert groups.among(params, None) is None


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("norm", [7.0, math.inf, math.nan])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_each_scaler_hears_of_its_own_checks(count: int, norm: float) -> None:
    group = SyncGroup(dist.group.WORLD, torch.device("cpu"), 1)
    found = [[torch.tensor([float(place == count - 1)]), torch.zeros(1)] for place in range(count)]
    told = FoundInfReduction.of(group, found, [], has_checks=True, norm=torch.tensor(norm))
    assert [bool(told.of_scaler(place)) for place in range(count)] == [False] * (count - 1) + [True]
    # A norm of inf or nan says nothing of the rest.
    assert float(told.norm) == pytest.approx(norm, nan_ok=True)
    assert (bool(told.now), told.has_checks(), told.loss_is_nonfinite()) == (True, True, False)
    silent = FoundInfReduction.of(group, [[]] * count, [torch.zeros(1)], has_checks=False, loss_is_nonfinite=True)
    assert (bool(silent.now), silent.has_checks(), silent.loss_is_nonfinite()) == (False, False, True)
    assert not any(bool(silent.of_scaler(place)) for place in range(count))


def with_gradients() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    params[0].grad, params[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    return params


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 25.0), (1.0, 7.0), (math.inf, 4.0)])
def test_the_norm_before_its_root_is_taken(norm_type: float, expected: float) -> None:
    assert float(powered_norm(with_gradients(), None, norm_type)) == pytest.approx(expected)
    assert float(powered_norm(with_gradients()[2:], None, norm_type)) == 0.0


@pytest.mark.parametrize("norm", [5.0, 0.5, math.inf, math.nan])
def test_clipping_multiplies_where_the_norm_is_too_high_and_finite(norm: float) -> None:
    params = with_gradients()
    clip_([*params, params[0]], torch.tensor(norm), 1.0)
    factor = 1.0 / 5.0 if norm == 5.0 else 1.0
    assert [param.grad.sum().item() for param in params[:2] if param.grad is not None] == pytest.approx(
        [3.0 * factor, 4.0 * factor], rel=1e-5
    )
