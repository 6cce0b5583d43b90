"""What looking for losses of half precision costs on a device: nothing but in steps 1, 4, 16, 64 and so on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoamp.diagnostics import HalfLosses
from tests.null_cuda.device import Cost, spent
from tests.null_cuda.training import open_libraries

pytestmark = pytest.mark.null_cuda


def costs(make: Callable[[Any], Any], half: torch.dtype, *, looks: bool) -> list[Cost]:
    """Return what each of 18 steps costs, of two backward passes each."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).cuda().to(half)
    model.register_buffer("kept", torch.ones((), dtype=half, device="cuda"))
    optimizer, x = make(model.parameters()), torch.ones(4, 8, device="cuda", dtype=half)
    losses = HalfLosses()

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(2):
            model(x).float().sum().backward()
        optimizer.step()

    if looks:
        losses.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [spent(step) for _ in range(18)]
    finally:
        losses.stop()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, capturable=True),
    ],
    ids=["plain", "fused", "capturable"],
)
def test_steps_that_are_not_sampled_launch_nothing_and_wait_for_nothing(make: Any, half: torch.dtype) -> None:
    open_libraries()
    costs(make, half, looks=False)
    plain, looked = costs(make, half, looks=False), costs(make, half, looks=True)
    sampled = [number for number, (one, other) in enumerate(zip(plain, looked, strict=True), 1) if one != other]
    assert sampled == [1, 4, 16]
    # A sampled step waits for what it reads.
    assert looked[3].waits > plain[3].waits
