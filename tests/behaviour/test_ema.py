"""docs/howto/ema.md: an average of the weights."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import autoamp
from tests.behaviour.training import OVERFLOW, Training, started


def test_follow_updates_the_average_after_steps_that_were_not_skipped() -> None:
    training = Training(started())
    average = torch.optim.swa_utils.AveragedModel(training.model)
    training.handle.follow(lambda: average.update_parameters(training.model))
    for factor in (1.0, OVERFLOW, 1.0):
        training.step(factor)
    assert average.n_averaged == 2


def test_the_average_computes_in_half_precision_as_the_model_does() -> None:
    training = Training(started())
    average = torch.optim.swa_utils.AveragedModel(training.model)
    assert next(average.parameters()).dtype == torch.float32
    assert average(torch.ones(1, 4)).dtype == training.model(torch.ones(1, 4)).dtype == torch.float16


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_an_average_that_half_precision_rounds_is_told_when_it_is_made(level: str) -> None:
    model = torch.nn.Linear(8, 2)
    autoamp.initialize(model, opt_level=level, device_type="cpu", dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"average of Linear in half precision.*docs/howto/ema.md"):
        torch.optim.swa_utils.AveragedModel(model)
    autoamp.initialize(model, opt_level="O1", device_type="cpu", dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.swa_utils.AveragedModel(model)


def test_at_O2_the_state_dict_has_changes_that_half_precision_rounds_away() -> None:
    model: Any = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    model, optimizer = autoamp.initialize(model, optimizer, opt_level="O2", device_type="cpu", loss_scale=128.0)
    with autoamp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert float(model.weight[0, 0].detach()) == 1.0
    assert 0.99998 < float(model.state_dict()["weight"][0, 0]) < 1.0
