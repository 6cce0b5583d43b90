"""A program that throws a bad batch away itself: the next step is of other gradients, and is taken."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp

# What the program does to the gradients of the bad batch.
CLEARS = {
    "none": lambda optimizer: optimizer.zero_grad(),
    "zeros": lambda optimizer: optimizer.zero_grad(set_to_none=False),
}
BAD, STEPS = 2, 6


def trained(clear: str, handle: Any, way: str, *, discards: bool = True) -> tuple[list[bool], Tensor]:
    """Train; returns whether each step that came moved the weights, and these."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "auto_scale":
        handle.auto_scale()
    moved = []
    for step in range(STEPS):
        x = torch.full((2, 4), torch.nan if step == BAD else (step + 1) / 4)
        CLEARS[clear](optimizer)
        loss = model(x).float().square().mean()
        with handle.scale_loss(loss, optimizer) if way == "scale_loss" else contextlib.nullcontext(loss) as scaled:
            scaled.backward()
        if discards and not loss.isfinite():
            CLEARS[clear](optimizer)
            continue
        before = model.weight.detach().clone()
        optimizer.step()
        moved.append(not torch.equal(before, model.weight))
    return moved, model.weight.detach().clone()


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("way", ["plain", "scale_loss", "auto_scale"])
@pytest.mark.parametrize("action", ["warn", "raise", "skip"])
@pytest.mark.parametrize("scale", [1.0, "dynamic"])
def test_the_step_after_a_batch_that_was_thrown_away_is_taken(clear: str, way: str, action: Any, scale: Any) -> None:
    handle: Any = autoamp.init(
        device_type="cpu", dtype=torch.bfloat16, loss_scale=scale, on_nonfinite=action, lists={"extends": []}
    )
    moved, weight = trained(clear, handle, way)
    if (clear, way, scale) == ("zeros", "auto_scale", "dynamic"):
        # There 0 is in place of the overflow already, so that nobody can tell who put it there.
        assert moved == [True, True, False, True, True]
        return
    assert moved == [True] * (STEPS - 1)
    assert handle.skipped_steps == 0
    handle.deactivate()
    plain: Any = autoamp.init(enabled=False)
    torch.testing.assert_close(weight, trained(clear, plain, "plain")[1])


@pytest.mark.parametrize("way", ["plain", "scale_loss", "auto_scale"])
@pytest.mark.parametrize("scale", [1.0, "dynamic"])
@pytest.mark.parametrize("clear", CLEARS)
def test_the_step_of_a_bad_batch_is_skipped_where_the_program_takes_it(way: str, scale: Any, clear: str) -> None:
    handle: Any = autoamp.init(
        device_type="cpu", dtype=torch.bfloat16, loss_scale=scale, on_nonfinite="skip", lists={"extends": []}
    )
    with (
        pytest.warns(UserWarning, match="has inf or nan")
        if scale == 1.0 or way == "plain"
        else contextlib.nullcontext()
    ):
        moved, weight = trained(clear, handle, way, discards=False)
    assert moved == [step != BAD for step in range(STEPS)]
    assert handle.skipped_steps == 1
    assert weight.isfinite().all()


@pytest.mark.parametrize("way", ["plain", "scale_loss", "auto_scale"])
def test_an_accumulated_overflow_is_no_batch_that_was_thrown_away(way: str) -> None:
    handle: Any = autoamp.init(
        device_type="cpu", dtype=torch.bfloat16, loss_scale="dynamic", on_nonfinite="skip", lists={"extends": []}
    )
    if way == "auto_scale":
        handle.auto_scale()
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    for value in (1.0, torch.nan, 1.0):
        loss = model(torch.full((2, 4), value)).float().square().mean()
        with handle.scale_loss(loss, optimizer) if way == "scale_loss" else contextlib.nullcontext(loss) as scaled:
            scaled.backward()
    with pytest.warns(UserWarning, match="has inf or nan") if way == "plain" else contextlib.nullcontext():
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert handle.skipped_steps == 1
