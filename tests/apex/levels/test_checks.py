"""The arguments of `initialize()`: those that are refused, and those that are warned of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import autoamp
from autoamp.errors import AutoampError, UsageError
from tests.apex.levels.shared import ALL_LEVELS, LISTS, initialize, network, same, sgd, train, values


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_a_level_in_the_place_of_enabled_is_told_where_it_belongs(level: str) -> None:
    with pytest.raises(UsageError, match=f"enabled='{level}' is not a bool; pass opt_level='{level}' by its name"):
        initialize(network(), enabled=level)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unhashable level": ({"opt_level": ["O1"]}, r"opt_level=\['O1'\] is unknown"),
    "model": ({"models": "model"}, "models takes a torch.nn.Module or a list of them, not a str"),
    "scope": ({"scope": "model"}, "scope='model' is unknown; choose 'global' or 'models'"),
    "cast_model_type": ({"cast_model_type": torch.int8}, "cast_model_type=torch.int8"),
    "dtype": ({"dtype": torch.float64}, "dtype=torch.float64 is not a half-precision dtype"),
    "losses": ({"num_losses": 0}, "num_losses=0 must be a whole number of 1 or more"),
    "scale": ({"loss_scale": -1.0}, r"loss_scale=-1.0 must be from 2"),
    "bounds": ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, "min_loss_scale=8.0 is above max_loss_scale"),
    "flag": ({"master_weights": "maybe"}, "master_weights='maybe' is not a bool; choose True, False or None"),
    "outputs": ({"cast_model_outputs": "fp32"}, "cast_model_outputs='fp32' is not a floating dtype"),
    "optimizer": ({"optimizers": 3}, "Expected an optimizer, got an int, which has no par"),
    "optimizers": ({"optimizers": [None]}, "Expected an optimizer, got None, which has no par"),
    "own scaler": (
        {"optimizers": autoamp.FP16_Optimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)]))},
        r"this FP16_Optimizer scales its loss itself: call optimizer.backward\(loss\)",
    ),
    "list": ({"lists": {"fp16": ["torch.nosuch"]}}, "'torch.nosuch' names nothing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_changes_nothing(case: str) -> None:
    model = network()
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    train(model, optimizer, 1)
    handle, before = autoamp.current_handle(), values(model)
    masters = list(autoamp.master_params(optimizer))
    kwargs, message = WRONG[case]
    with pytest.raises(AutoampError, match=message):
        initialize(**{"models": model, "optimizers": optimizer, "opt_level": "O1", **kwargs})
    assert autoamp.current_handle() is handle
    assert handle.is_active()  # type: ignore[union-attr]
    assert model[0].weight.dtype is torch.float16
    assert list(autoamp.master_params(optimizer)) == masters
    assert same(values(model), before)
    train(model, optimizer, 1)


@pytest.mark.parametrize("kind", [DataParallel, DistributedDataParallel])
def test_wrapped_models_are_refused(kind: type) -> None:
    wrapped = kind.__new__(kind)
    nn.Module.__init__(wrapped)
    with pytest.raises(RuntimeError, match=f"wrapped in {kind.__name__} already; call initialize"):
        initialize([nn.Linear(1, 1), wrapped])


def test_warnings_point_at_the_line_of_the_caller() -> None:
    with pytest.warns(UserWarning, match="has no effect at opt_level='O1'") as caught:
        autoamp.initialize(network(), keep_batchnorm_fp32=True, device_type="cpu", lists=LISTS, verbosity=0)
    statistics = pytest.warns(UserWarning, match="keeps its running statistics in torch.float16")
    with statistics, pytest.warns(UserWarning, match="its fp32 values are lost") as more:
        autoamp.initialize(network().half(), device_type="cpu", lists=LISTS, verbosity=0)
    modules = {"modules": {"head": "fp32"}}
    with pytest.warns(UserWarning, match=r"'head' matches no module of Sequential") as most:
        autoamp.initialize(network(), opt_level="O2", lists=modules, device_type="cpu", verbosity=0)
    assert {warning.filename for warning in [*caught, *more, *most]} == {__file__}


def test_a_model_that_was_sharded_first_is_refused_where_it_is_cast() -> None:
    class FSDPModule:
        pass

    class Sharded(FSDPModule, torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Sharded(2, 2))
    with pytest.raises(autoamp.UsageError, match=r"sharded '1' already.*initialize\(model\) first"):
        autoamp.initialize(model, opt_level="O2", device_type="cpu", verbosity=0)
    assert model[0].weight.dtype is torch.float32
