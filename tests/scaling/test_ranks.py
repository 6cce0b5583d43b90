"""What steps of several ranks ask for. With really spawned ranks: test_scaled_ranks_integration.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autoamp.scaling.ranks import is_flat, is_sharded, non_finite_now


def test_a_plain_parameter_is_no_shard() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not is_sharded(parameter)
    assert not is_flat(parameter)


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_gradients_as_they_are_now(value: float) -> None:
    params = [torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True), torch.zeros(1)]
    params[0].grad = torch.tensor([1.0, value])
    params[1].grad = before = torch.ones(1)
    assert [bool(flag) for flag in non_finite_now(params, [])] == [not math.isfinite(value)]
    assert params[1].grad is before
    assert torch.equal(before, torch.ones(1))
    assert non_finite_now(params[2:], []) == []
