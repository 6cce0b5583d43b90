"""What looking for overflows costs on a device: a clean step waits once at most, and launches no more."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.tools import diagnostics_of
from tests.null_cuda.device import Cost, spent
from tests.null_cuda.training import OPTIMIZERS, open_libraries

pytestmark = pytest.mark.null_cuda


def clean_step(optimizer_name: str, **settings: Any) -> Cost:
    """Return what the fourth step costs, by a scaled loss in fp16."""
    open_libraries()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
    optimizer, x = OPTIMIZERS[optimizer_name](model.parameters()), torch.ones(4, 8, device="cuda")
    handle: Any = autoamp.init(device_type="cuda", **settings)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).float().sum()
        with (
            contextlib.nullcontext(loss) if "on_nonfinite" in settings else handle.scale_loss(loss, optimizer) as scaled
        ):
            scaled.backward()
        optimizer.step()

    try:
        for _ in range(3):
            step()
        assert diagnostics_of(handle).overflows.recorder.step.is_recorded == settings.get("trace_overflow", False)
        return spent(step)
    finally:
        handle.deactivate()


@pytest.mark.parametrize("name", ["SGD", "AdamW-fused", "AdamW-capturable"])
def test_a_clean_step_waits_once_and_launches_no_more(name: str) -> None:
    plain, traced = (clean_step(name, dtype=torch.float16, trace_overflow=traced) for traced in (False, True))
    # Whether the tape of a step is to be explained has to be known before the next one begins. The flag of a fused
    # optimizer stays on the device otherwise.
    assert traced.waits == max(plain.waits, 1)
    # The loss is looked at too: it may be inf where all gradients are finite.
    assert traced.launches <= plain.launches + 1


@pytest.mark.parametrize(("on_nonfinite", "waits"), [("warn", 0), ("raise", 1)])
def test_a_clean_step_without_a_scale_waits_only_where_the_flag_decides(on_nonfinite: str, waits: int) -> None:
    assert clean_step("SGD", dtype=torch.bfloat16, on_nonfinite=on_nonfinite).waits == waits
