"""Checkpoints of Apex's FP16_Optimizer: those of early 2019 are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autoamp.apex.fp16_utils import DynamicLossScaler, FP16_Optimizer
from autoamp.errors import CheckpointError


def built() -> FP16_Optimizer:
    return FP16_Optimizer(torch.optim.SGD(nn.Linear(3, 2).half().parameters(), lr=0.01), static_loss_scale=64)


@pytest.mark.parametrize("masters", ["fp32_groups", "fp32_groups_flat"])
def test_a_checkpoint_of_2019_is_refused_and_changes_nothing(masters: str) -> None:
    optimizer = built()
    before = [master.detach().clone() for group in optimizer.fp32_groups for master in group]
    saved = {
        "dynamic_loss_scale": False, "cur_scale": 2.0, "cur_iter": 9,
        "optimizer_state_dict": torch.optim.SGD([nn.Parameter(torch.ones(8))], lr=0.5).state_dict(),
        masters: [[torch.ones(8)]] if masters == "fp32_groups" else [torch.ones(8)],
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=r"'cur_scale'.*early 2019.*load it with autoamp 0\.2 and save it again"):
        optimizer.load_state_dict(saved)
    assert (optimizer.loss_scale, optimizer.param_groups[0]["lr"]) == (64, 0.01)
    torch.testing.assert_close([m.detach() for group in optimizer.fp32_groups for m in group], before, rtol=0, atol=0)


def test_what_is_no_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="int"):
        built().load_state_dict(3)  # type: ignore[arg-type]


def test_a_checkpoint_of_apex_holds_the_scaler_itself(tmp_path: Path) -> None:
    """Apex pickled it; of an object of its class the fields are those of Apex."""
    module = nn.Linear(3, 2).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(module.parameters(), lr=0.01), dynamic_loss_scale=True)
    saved, theirs = optimizer.state_dict(), object.__new__(DynamicLossScaler)
    vars(theirs).update(cur_scale=1024.0, cur_iter=7, last_overflow_iter=3, scale_factor=2.0, scale_window=1000)
    torch.save({**saved, "loss_scaler": theirs}, tmp_path / "saved.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=False))
    assert (optimizer.loss_scale, optimizer.loss_scaler.unskipped) == (1024.0, 3)
    vars(theirs)["cur_scale"] = "much"
    with pytest.raises(CheckpointError, match="much"):
        optimizer.load_state_dict({**saved, "loss_scaler": theirs})
    assert optimizer.loss_scale == 1024.0
