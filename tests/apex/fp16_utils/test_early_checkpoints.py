"""Checkpoints and flat groups of the FP16_Optimizer of early 2019."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoamp.apex.fp16_utils import FP16_Optimizer
from autoamp.apex.optimizers import FusedAdam
from autoamp.errors import CheckpointError


def built(**options: Any) -> tuple[nn.Module, FP16_Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).half()
    groups = [
        {"params": list(layer.parameters()), "weight_decay": decay}
        for layer, decay in zip(model, (0.1, 0.0), strict=True)
    ]
    return model, FP16_Optimizer(FusedAdam(groups, lr=0.01, bias_correction=False), **options)


def train(model: nn.Module, optimizer: FP16_Optimizer, steps: int) -> list[Tensor]:
    for step in range(steps):
        given = torch.randn(4, 3, generator=torch.Generator().manual_seed(step)).half()
        optimizer.backward(model(given).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [master.detach().clone() for group in optimizer.fp32_groups for master in group]


def as_of_2019(optimizer: FP16_Optimizer, kind: str) -> dict[str, Any]:
    """Write a checkpoint in the old form, by hand."""
    inner = copy.deepcopy(optimizer.state_dict()["optimizer_state_dict"])
    early = {"dynamic_loss_scale": optimizer.dynamic_loss_scale, "cur_scale": optimizer.loss_scale, "cur_iter": 1013}
    early |= {"last_overflow_iter": 9, "scale_factor": 2, "scale_window": 1000} if optimizer.dynamic_loss_scale else {}
    if kind == "fp32_groups":
        return {**early, "optimizer_state_dict": inner, "fp32_groups": copy.deepcopy(optimizer.fp32_groups)}
    state: dict[int, Any] = {}
    for index, group in enumerate(inner["param_groups"]):
        own = [inner["state"][key] for key in group["params"]]
        state[index] = {
            name: torch.cat([one[name].reshape(-1) for one in own]) for name in ("exp_avg", "exp_avg_sq")
        } | {"step": group.pop("step")}
        group["params"] = [index]
    flats = [torch.cat([master.detach().reshape(-1) for master in group]) for group in optimizer.fp32_groups]
    return {**early, "optimizer_state_dict": {**inner, "state": state}, "fp32_groups_flat": flats}


@pytest.mark.parametrize("options", [{"dynamic_loss_scale": True}, {"static_loss_scale": 64}], ids=str)
@pytest.mark.parametrize("kind", ["fp32_groups", "fp32_groups_flat"])
def test_early_checkpoint_resumes_the_run(options: dict[str, Any], kind: str) -> None:
    model, optimizer = built(**options)
    train(model, optimizer, 3)
    saved = as_of_2019(optimizer, kind)
    expected = train(model, optimizer, 3)
    other_model, other = built(**options)
    other.load_state_dict(saved)
    assert other.loss_scale == saved["cur_scale"]
    # From step 10 to step 1013; the scale grew after a window of 1000.
    assert other.loss_scaler.unskipped == (3 if other.dynamic_loss_scale else 0)
    assert [group["step"] for group in other.param_groups] == [3, 3]
    torch.testing.assert_close(train(other_model, other, 3), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda saved: saved.pop("fp32_groups_flat"), "fp32_groups_flat"),
        (lambda saved: saved.pop("optimizer_state_dict"), "optimizer_state_dict"),
        (lambda saved: saved["optimizer_state_dict"]["param_groups"].pop(), "optimizer_state_dict"),
        (lambda saved: saved["optimizer_state_dict"].pop("state"), "optimizer_state_dict"),
        (lambda saved: saved["fp32_groups_flat"].reverse(), r"\[6, 8\].*\[8, 6\]"),
        (lambda saved: saved.update(cur_scale=0.0), "loss_scale"),
    ],
)
def test_torn_checkpoint_changes_nothing(change: Any, named: str) -> None:
    model, optimizer = built(static_loss_scale=64)
    train(model, optimizer, 1)
    saved = as_of_2019(optimizer, "fp32_groups_flat")
    change(saved)
    before = train(model, optimizer, 1)
    with pytest.raises(CheckpointError, match=named):
        optimizer.load_state_dict(saved)
    assert optimizer.loss_scale == 64
    torch.testing.assert_close([m.detach() for group in optimizer.fp32_groups for m in group], before, rtol=0, atol=0)


def test_what_is_no_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="int"):
        built()[1].load_state_dict(3)  # type: ignore[arg-type]
