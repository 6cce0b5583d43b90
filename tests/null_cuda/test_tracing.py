"""What looking for overflows costs on a device: a clean step waits no more, and launches no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.runtime import runtime_of
from tests.null_cuda.device import Cost, spent
from tests.null_cuda.training import open_libraries

pytestmark = pytest.mark.null_cuda


def clean_step(make: Callable[[Any], Any], *, traced: bool) -> Cost:
    open_libraries()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
    optimizer = make(model.parameters())
    handle = autoamp.init(device_type="cuda", dtype=torch.float16, loss_scale="dynamic", trace_overflow=traced)
    x = torch.ones(4, 8, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with handle.scale_loss(model(x).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    try:
        for _ in range(3):
            step()
        assert runtime_of(handle).overflows.recorder.records == traced
        return spent(step)
    finally:
        handle.deactivate()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, capturable=True),
    ],
    ids=["plain", "fused", "capturable"],
)
def test_a_clean_step_waits_and_launches_no_more(make: Callable[[Any], Any]) -> None:
    plain, traced = clean_step(make, traced=False), clean_step(make, traced=True)
    assert traced.waits == plain.waits
    # The loss is looked at too: it may be inf where all gradients are finite.
    assert plain.launches <= traced.launches <= plain.launches + 1


@pytest.mark.parametrize(("on_nonfinite", "waits"), [("warn", 0), ("raise", 1)])
def test_a_clean_step_without_a_scale_waits_only_where_the_flag_decides(on_nonfinite: str, waits: int) -> None:
    open_libraries()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 8, device="cuda")
    handle = autoamp.init(device_type="cuda", dtype=torch.bfloat16, on_nonfinite=on_nonfinite)

    def step() -> None:
        optimizer.zero_grad()
        model(x).float().sum().backward()
        optimizer.step()

    try:
        for _ in range(3):
            step()
        assert spent(step).waits == waits
    finally:
        handle.deactivate()
