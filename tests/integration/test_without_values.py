"""Whole training steps with tensors that have no values, as programs run them to learn shapes and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import autoamp
from autoamp.errors import NonFiniteGradientsError

HALF, BF16 = torch.float16, torch.bfloat16


def trained(handle: Any, model: nn.Module, optimizer: Any, scales: bool) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).float().mean()
        if scales:
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.mark.parametrize("where", ["fake", "meta"])
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("way", ["plain", "block", "auto_scale", "O1", "O2", "O3"])
def test_steps_without_values_are_taken(where: str, dtype: torch.dtype, kind: str, way: str) -> None:
    mode: Any = FakeTensorMode() if where == "fake" else torch.device("meta")
    with mode:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    if way.startswith("O"):
        autoamp.initialize(model, optimizer, opt_level=way, dtype=dtype, device_type="cpu", verbosity=0)
    else:
        autoamp.init(device_type="cpu", dtype=dtype)
    handle: Any = autoamp.current_handle()
    try:
        if way == "auto_scale":
            handle.auto_scale()
        scales = way not in ("plain", "auto_scale")
        with mode:
            trained(handle, model, optimizer, scales)
        assert handle.skipped_steps == 0
        # Nothing of it is left for tensors with values.
        own = nn.Sequential(nn.Linear(4, 4))
        before = own[0].weight.detach().clone()
        trained(handle, own, torch.optim.SGD(own.parameters(), lr=0.1), scales)
        assert not torch.equal(own[0].weight, before)
    finally:
        handle.deactivate()


@pytest.mark.parametrize("where", ["fake", "meta"])
def test_a_question_for_shapes_hides_no_overflow(where: str) -> None:
    handle = autoamp.init(device_type="cpu", dtype=BF16, on_nonfinite="raise")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mode: Any = FakeTensorMode() if where == "fake" else torch.device("meta")
    with mode:
        nn.Linear(4, 4)(torch.randn(2, 4)).float().mean().backward()
    (model(torch.ones(2, 4)).float().mean() * torch.inf).backward()
    with pytest.raises(NonFiniteGradientsError):
        optimizer.step()
    handle.deactivate()
