"""What each opt level means, what overrides it, and the loss scalers that it asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.core import DynamicLossScaler, StaticLossScaler
from autoamp.errors import UsageError
from tests.apex.levels.shared import initialize, network, scalers, sgd


@pytest.mark.parametrize("keep", [True, False])
def test_keep_batchnorm_fp32_overrides(keep: bool) -> None:
    model = initialize(network(), opt_level="O3" if keep else "O2", keep_batchnorm_fp32=keep)
    expected = torch.float32 if keep else torch.float16
    assert model[1].weight.dtype is expected
    assert model[1].running_var.dtype is expected
    assert model[0].weight.dtype is torch.float16


def test_master_weights_overrides() -> None:
    model = network()
    model, optimizer = initialize(model, sgd(model), opt_level="O3", master_weights=True)
    assert {p.dtype for p in autoamp.master_params(optimizer)} == {torch.float32}
    model, optimizer = initialize(model, optimizer, opt_level="O2", master_weights=False, keep_batchnorm_fp32=False)
    assert {p.dtype for p in autoamp.master_params(optimizer)} == {torch.float16}


def test_cast_model_type_overrides() -> None:
    assert initialize(network(), opt_level="O2", cast_model_type=torch.bfloat16)[0].weight.dtype is torch.bfloat16
    model = initialize(network(), opt_level="O0", cast_model_type=torch.float16, keep_batchnorm_fp32=True)
    assert model[0].weight.dtype is torch.float16
    model = initialize(model.half(), opt_level="O3", cast_model_type=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_patch_torch_functions_overrides() -> None:
    inputs = torch.ones(2, 3)
    initialize(nn.Linear(3, 3), opt_level="O0", patch_torch_functions=True)
    assert nn.Linear(3, 3)(inputs).dtype is torch.float16
    initialize(nn.Linear(3, 3), opt_level="O1", patch_torch_functions=False)
    assert nn.Linear(3, 3)(inputs).dtype is torch.float32
    with pytest.raises(UsageError, match=r"patch_torch_functions=True .* choose one of the two"):
        initialize(nn.Linear(3, 3), opt_level="O2", patch_torch_functions=True)


@pytest.mark.parametrize(
    ("level", "dtype", "given", "scale"),
    [
        ("O3", torch.float16, None, 1.0),
        ("O2", torch.float16, None, 2.0**16),
        ("O2", torch.bfloat16, None, 1.0),
        ("O2", torch.float16, 128, 128.0),
    ],
)
def test_loss_scale_overrides(level: str, dtype: torch.dtype, given: Any, scale: float) -> None:
    model = network()
    initialize(model, sgd(model), opt_level=level, loss_scale=given, dtype=dtype)
    with autoamp.scale_loss(torch.ones((), dtype=torch.float16, requires_grad=True), []) as scaled:
        assert scaled.item() == scale
        assert scaled.dtype is torch.float32
    assert type(scalers()[0]) is (DynamicLossScaler if scale == 2.0**16 else StaticLossScaler)


def test_bounds_of_the_loss_scale() -> None:
    initialize(network(), opt_level="O2", min_loss_scale=2.0**17, num_losses=2)
    assert [s.loss_scale for s in scalers()] == [2.0**17] * 2
    initialize(network(), opt_level="O2", max_loss_scale=4.0)
    scaler = scalers()[0]
    assert scaler.loss_scale == 4.0
    scaler.growth_interval = 1
    scaler.update(False)
    assert scaler.loss_scale == 4.0
    initialize(network(), opt_level="O2", loss_scale="dynamic", dtype=torch.bfloat16, min_loss_scale=2.0**15)
    for _ in range(5):
        scalers()[0].update(True)
    assert scalers()[0].loss_scale == 2.0**15


def test_a_given_scaler_serves_one_loss() -> None:
    given = DynamicLossScaler(init_scale=8.0)
    initialize(network(), opt_level="O1", loss_scale=given, num_losses=2)
    first, second = scalers()
    assert first is given
    second.update(True)
    assert (first.loss_scale, second.loss_scale) == (8.0, 4.0)
