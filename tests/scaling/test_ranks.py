"""Gradients as they are now. With really spawned ranks: tests/integration/test_agreement.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autoamp.scaling.ranks import clip_, non_finite_now, powered_norm


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_gradients_as_they_are_now(value: float) -> None:
    params = [torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True), torch.zeros(1)]
    params[0].grad = torch.tensor([1.0, value])
    params[1].grad = before = torch.ones(1)
    assert [bool(flag) for flag in non_finite_now(params)] == [not math.isfinite(value)]
    assert params[1].grad is before
    assert torch.equal(before, torch.ones(1))
    assert non_finite_now(params[2:]) == []


def _with_gradients() -> list[torch.Tensor]:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    params[0].grad, params[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    return list(params)


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 25.0), (1.0, 7.0), (math.inf, 4.0)])
def test_the_norm_before_its_root_is_taken(norm_type: float, expected: float) -> None:
    assert float(powered_norm(_with_gradients(), None, norm_type)) == pytest.approx(expected)
    assert float(powered_norm(_with_gradients()[2:], None, norm_type)) == 0.0


@pytest.mark.parametrize("norm", [5.0, 0.5, math.inf, math.nan])
def test_clipping_multiplies_where_the_norm_is_too_high_and_finite(norm: float) -> None:
    params = _with_gradients()
    clip_(params, torch.tensor(norm), 1.0)
    expected = 3.0 / 5.0 if norm == 5.0 else 3.0
    assert float(params[0].grad[0]) == pytest.approx(expected, rel=1e-5)  # type: ignore[index]
