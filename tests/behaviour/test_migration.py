"""docs/migration.md: scripts of Apex."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autoamp
import autoamp.compat


@pytest.fixture
def apex() -> Iterator[Any]:
    """`import apex`, which finds autoamp."""
    autoamp.compat.install_as_apex(device_type="cpu")
    yield importlib.import_module("apex")
    autoamp.compat.uninstall()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_script_of_apex_trains_unedited_at_every_level(apex: Any, level: str) -> None:
    model = torch.nn.Linear(4, 1)
    model, optimizer = apex.amp.initialize(
        model, apex.optimizers.FusedAdam(model.parameters(), lr=0.1, eps=1e-4), opt_level=level, verbosity=0
    )
    before = model.weight.detach().clone()
    for _ in range(3):
        with apex.amp.scale_loss(model(torch.rand(8, 4)).float().square().mean() * 0.1, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert not torch.equal(model.weight, before)


def test_strings_stand_for_bools_and_numbers_as_in_apex(apex: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model = apex.amp.initialize(model, opt_level="O2", keep_batchnorm_fp32="True", loss_scale="128.0", verbosity=0)
    assert (model[0].weight.dtype, model[1].weight.dtype) == (torch.float16, torch.float32)
    assert apex.amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0


def test_a_name_that_is_not_provided_says_what_to_use(apex: Any) -> None:
    with pytest.raises(ImportError, match=r"use Megatron Core, or torch\.distributed"):
        importlib.import_module("apex.transformer")
    with pytest.raises(AttributeError, match=r"torch\.optim\.AdamW"):
        _ = apex.optimizers.FusedAdamSWA


def test_a_checkpoint_of_apex_loads(apex: Any) -> None:
    apex.amp.initialize(torch.nn.Linear(4, 1), opt_level="O1", verbosity=0)
    apex.amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}})
    assert apex.amp.state_dict()["loss_scaler0"] == {"loss_scale": 512.0, "unskipped": 3}
    # Its state has no count of skips.
    assert autoamp.state_dict()["skipped_steps"] == 0


def test_after_uninstall_apex_is_gone(apex: Any) -> None:
    autoamp.compat.uninstall()
    with pytest.raises(ImportError):
        importlib.import_module("apex")
