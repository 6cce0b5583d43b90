"""Networks cast by hand, and masters beside their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autoamp
from autoamp.apex.fp16_utils import (
    BN_convert_float,
    FP16Model,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from autoamp.errors import UsageError


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False), nn.Flatten(), nn.Linear(3 * 16, 2)
    )


def dtypes(module: nn.Module) -> list[torch.dtype]:
    return [p.dtype for p in module.parameters()]


def test_the_star_import_brings_the_legacy_names() -> None:
    names: dict[str, Any] = {}
    exec("from autoamp.fp16_utils import *", names)
    assert {
        "FP16_Optimizer", "network_to_half", "BN_convert_float", "convert_module", "convert_network", "FP16Model",
        "tofp16", "prep_param_lists", "model_grads_to_master_grads", "master_params_to_model_params",
        "to_python_float", "LossScaler", "DynamicLossScaler", "clip_grad_norm",
    } == set(names) - {"__builtins__"}  # fmt: skip
    assert names["FP16_Optimizer"] is autoamp.FP16_Optimizer


# -- networks --


def test_tofp16() -> None:
    number = torch.tensor([1])
    one, (two, same) = tofp16()([torch.ones(2), (torch.ones(1).double(), number)])
    assert one.dtype is two.dtype is torch.float16
    assert same is number


def test_bn_convert_float() -> None:
    model = network().half()
    assert BN_convert_float(model) is model
    assert model[1].weight.dtype is model[1].running_mean.dtype is torch.float32
    assert model[2].running_mean.dtype is torch.float16
    assert model[0].weight.dtype is torch.float16
    norm = nn.BatchNorm1d(2).half()
    assert BN_convert_float(norm).weight.dtype is torch.float32


def test_network_to_half() -> None:
    inner = network()
    del inner[2]
    model = network_to_half(inner)
    assert isinstance(model[0], tofp16)
    assert model[1] is inner
    assert dtypes(model) == [torch.float16] * 2 + [torch.float32] * 2 + [torch.float16] * 2
    assert model(torch.ones(2, 1, 6, 6)).dtype is torch.float16


def test_convert_module_leaves_children_alone() -> None:
    model = nn.Module()
    model.child = nn.Linear(1, 1)
    model.own = nn.Parameter(torch.ones(2))
    model.own.grad = torch.ones(2)
    model.register_buffer("table", torch.ones(1))
    model.register_buffer("count", torch.ones(1, dtype=torch.int32))
    model.register_buffer("none", None)
    own = model.own
    convert_module(model, torch.bfloat16)
    assert model.own is own
    assert own.dtype is own.grad.dtype is model.table.dtype is torch.bfloat16  # type: ignore[union-attr]
    assert model.count.dtype is torch.int32
    assert model.child.weight.dtype is torch.float32


def test_convert_network() -> None:
    model = nn.Sequential(network(), nn.LSTM(2, 2))
    assert convert_network(model, torch.float16) is model
    assert dtypes(model[0]) == [torch.float16] * 2 + [torch.float32] * 2 + [torch.float16] * 2
    assert set(dtypes(model[1])) == {torch.float16}
    assert model[0][2].running_mean.dtype is torch.float16


def test_fp16_model() -> None:
    inner = nn.Linear(2, 3)
    model = FP16Model(inner)
    assert model.network is inner
    assert model(torch.ones(1, 2)).dtype is torch.float16


# -- masters --


@pytest.mark.parametrize("flat", [False, True])
def test_training_by_hand(flat: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).half()
    model[0].bias.requires_grad_(False)
    params, masters = prep_param_lists(model, flat_master=flat)
    assert [id(p) for p in params] == [id(p) for p in model.parameters() if p.requires_grad]
    assert len(masters) == (1 if flat else 3)
    assert all(m.dtype is torch.float32 and m.requires_grad and m.is_leaf for m in masters)
    assert sum(m.numel() for m in masters) == sum(p.numel() for p in params)
    optimizer = torch.optim.SGD(masters, lr=0.1)
    inputs, targets = torch.randn(5, 3).half(), torch.randn(5, 2)
    losses = []
    for _ in range(5):
        model.zero_grad()
        loss = mse_loss(model(inputs).float(), targets)
        (loss * 16).backward()
        model_grads_to_master_grads(params, masters, flat_master=flat)
        grads = torch.cat([p.grad.flatten() for p in params]).float()
        assert torch.equal(torch.cat([m.grad.flatten() for m in masters]), grads)
        for master in masters:
            master.grad.div_(16)
        assert torch.equal(torch.cat([p.grad.flatten() for p in params]).float(), grads)
        optimizer.step()
        master_params_to_model_params(params, masters, flat_master=flat)
        values = torch.cat([p.detach().flatten() for p in params])
        assert torch.equal(values, torch.cat([m.detach().flatten() for m in masters]).half())
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("flat", [False, True])
def test_parameters_without_a_gradient(flat: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    params, masters = prep_param_lists(model, flat_master=flat)
    model[0](torch.ones(1, 2).half()).sum().backward()
    model_grads_to_master_grads(params, masters, flat_master=flat)
    if flat:
        assert masters[0].grad[:6].any()
        assert not masters[0].grad[6:].any()
    else:
        assert [m.grad is None for m in masters] == [False, False, True, True]


def test_fp32_gradients_are_copies() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    master = nn.Parameter(torch.ones(2))
    model_grads_to_master_grads([parameter], [master])
    assert master.grad is not parameter.grad
    assert master.grad.data_ptr() != parameter.grad.data_ptr()


def test_flat_masters_take_one_dtype() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).half())
    with pytest.raises(UsageError, match=r"flat_master=True takes parameters of one dtype, not .*float16.*float32"):
        prep_param_lists(model, flat_master=True)
    assert len(prep_param_lists(model)[1]) == 4


def test_small_tools() -> None:
    assert to_python_float(torch.tensor([2.5])) == 2.5
    assert to_python_float(torch.tensor(2.5)) == 2.5
    assert to_python_float([1.5]) == 1.5
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm([parameter], 1.0) == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    master_params_to_model_params([], [])
