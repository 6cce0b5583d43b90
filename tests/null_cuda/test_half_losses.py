"""What looking for losses of half precision costs on a device: nothing but in steps 1, 4, 16, 64 and so on."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from autoamp.tools import HalfLosses
from tests.null_cuda.device import Cost, spent
from tests.null_cuda.training import HALVES, OPTIMIZERS, open_libraries

pytestmark = pytest.mark.null_cuda


def costs(optimizer_name: str, half: torch.dtype, *, looks: bool) -> list[Cost]:
    """Return what each of 18 steps costs, of two backward passes each."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).cuda().to(half)
    model.register_buffer("kept", torch.ones((), dtype=half, device="cuda"))
    optimizer, x = OPTIMIZERS[optimizer_name](model.parameters()), torch.ones(4, 8, device="cuda", dtype=half)
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


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["SGD", "AdamW-fused", "AdamW-capturable"])
def test_steps_that_are_not_sampled_launch_nothing_and_wait_for_nothing(name: str, half: str) -> None:
    open_libraries()
    costs(name, HALVES[half], looks=False)
    plain, looked = (costs(name, HALVES[half], looks=looks) for looks in (False, True))
    sampled = [number for number, (one, other) in enumerate(zip(plain, looked, strict=True), 1) if one != other]
    assert sampled == [1, 4, 16]
    # A sampled step waits for what it reads.
    assert looked[3].waits > plain[3].waits
