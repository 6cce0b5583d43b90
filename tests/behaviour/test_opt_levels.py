"""docs/opt_levels.md: the opt levels O0 to O3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from tests.behaviour.training import step

FP16, FP32 = torch.float16, torch.float32


def initialized(level: Any, **settings: Any) -> tuple[nn.Sequential, torch.optim.SGD]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return autoamp.initialize(model, optimizer, opt_level=level, device_type="cpu", dtype=FP16, **settings)


@pytest.mark.filterwarnings("ignore:BatchNorm1d '1' keeps its running statistics")
@pytest.mark.parametrize(
    ("level", "weight", "norm"),
    [("O0", FP32, FP32), ("O1", FP32, FP32), ("O2", FP16, FP32), ("O3", FP16, FP16)],
)
def test_a_level_says_in_which_dtype_weights_and_norms_are(level: str, weight: torch.dtype, norm: torch.dtype) -> None:
    settings = {"keep_batchnorm_fp32": False} if level == "O3" else {}
    model, _ = initialized(level, **settings)
    assert (model[0].weight.dtype, model[1].weight.dtype) == (weight, norm)


def test_at_O2_the_optimizer_steps_fp32_masters_which_are_rounded_into_weights_and_saved_as_they_are() -> None:
    model, optimizer = initialized("O2", loss_scale=128.0)
    step(model, optimizer)
    master, state = next(iter(autoamp.master_params(optimizer))), model.state_dict()
    assert master.dtype == state["0.weight"].dtype == FP32
    assert torch.equal(master.to(FP16), model[0].weight)
    assert torch.equal(master, state["0.weight"])
    nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).load_state_dict(state)


@pytest.mark.parametrize("wrong", ["02", "o2", 2, "O4"], ids=repr)
def test_a_level_that_is_none_is_refused_with_the_levels_and_the_letter_O(wrong: Any) -> None:
    with pytest.raises(autoamp.UsageError, match=r"'O2' or 'O3', which begin with the letter O, not the digit 0"):
        initialized(wrong)
    assert autoamp.current_handle() is None
