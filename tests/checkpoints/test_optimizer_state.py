"""The state of optimizers by names: of parameters with and without state, under wrappers, and of closures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import autoamp
from autoamp.checkpoints import DistributedState
from autoamp.checkpoints.distributed_state import load_optimizers, optimizers_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_parameters_without_state(tmp_path: Path) -> None:
    """One parameter is frozen, and one has had no gradient so far."""

    def make(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]).requires_grad_(True)
        model[2].requires_grad_(False)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make(0)
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dcp.save({"t": DistributedState(model, optimizer)}, checkpoint_id=tmp_path / "at")
    other, resumed = make(1)
    dcp.load({"t": DistributedState(other, resumed)}, checkpoint_id=tmp_path / "at")
    before, after = optimizer.state_dict(), resumed.state_dict()
    assert before["state"].keys() == after["state"].keys() == {0, 1}
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert before["param_groups"] == after["param_groups"]


def test_names_are_those_without_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = DistributedState(model, torch.optim.SGD(model.parameters(), 0.1)).state_dict()
    wrapped: Any = torch.compile(model, backend="eager")
    state = DistributedState(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1)).state_dict()
    assert state["model"].keys() == plain["model"].keys()
    assert state["optimizer"].keys() == plain["optimizer"].keys()


def test_the_state_of_another_class_is_refused() -> None:
    model = nn.Linear(2, 2)
    # A first step takes a closure, so nothing is known of its state.
    optimizer = torch.optim.LBFGS(model.parameters())
    state = optimizers_state(model, [optimizer])
    assert not [key for key in state if key.startswith("state.")]
    before = optimizer.state_dict()
    with pytest.raises(autoamp.CheckpointError, match=r"the state of LBFGS for parameter 'weight' is missing"):
        load_optimizers(model, [optimizer], {**state, "stepped": "weight"})
    assert optimizer.state_dict() == before


def test_several_optimizers_and_groups() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    def make(lr: float) -> list[Any]:
        groups = [{"params": model["a"].weight, "lr": lr}, {"params": model["a"].bias, "lr": 2 * lr}]
        return [torch.optim.Adam(groups), torch.optim.SGD(model["b"].parameters(), lr=3 * lr, momentum=0.9)]

    saved = make(0.5)
    for optimizer in saved:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state = optimizers_state(model, saved)
    assert state["stepped"].split("\n") == ["a.weight", "a.bias", "b.weight", "b.bias"]
    loaded = make(0.1)
    load_optimizers(model, loaded, state)
    for one, other in zip(saved, loaded, strict=True):
        torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=0, atol=0)
