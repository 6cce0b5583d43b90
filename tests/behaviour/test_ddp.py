"""docs/howto/ddp.md: DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.behaviour.training import OVERFLOW, step


def wrapped(level: Any) -> tuple[Any, Any]:
    model = torch.nn.Linear(4, 1)
    model, optimizer = autoamp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, device_type="cpu", dtype=torch.float16
    )
    return DistributedDataParallel(model), optimizer


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_that_is_wrapped_after_initialize_trains_and_skips(level: Any, one_process: None) -> None:
    model, optimizer = wrapped(level)
    before = model.module.weight.detach().clone()
    step(model, optimizer, OVERFLOW)
    assert torch.equal(model.module.weight, before)
    step(model, optimizer, 0.1)
    assert not torch.equal(model.module.weight, before)
    assert autoamp.current_handle().skipped_steps == 1  # type: ignore[union-attr]


def test_a_model_that_was_wrapped_before_initialize_is_refused(one_process: None) -> None:
    with pytest.raises(autoamp.UsageError, match=r"already; call initialize\(\) first"):
        autoamp.initialize(DistributedDataParallel(torch.nn.Linear(4, 1)), opt_level="O1", device_type="cpu")
